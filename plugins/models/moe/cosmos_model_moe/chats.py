"""Chat templates for tokenizers that have none of their own."""

from __future__ import annotations

from typing import Final

CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK_END: Final = "<｜end▁of▁sentence｜>"
DEEPSEEK_CHAT: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}<｜User｜>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<｜Assistant｜>{{ message.content }}<｜end▁of▁sentence｜>"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
MOONLIGHT_CHAT: Final = (
    "{% for message in messages %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>"
    "{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
