"""The module that each process of vLLM imports, before it loads a model (`worker_extension_cls`)."""

from cosmos_engine_vllm.extension import WorkerExtension, register

__all__ = ["WorkerExtension"]

register()
