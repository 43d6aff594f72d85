"""Modules that the server of forked commands imports once, with one thread each."""

import cosmos_core.models  # noqa: F401 - before anything of transformers

# isort: split
import torch
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

torch.set_num_threads(1)
