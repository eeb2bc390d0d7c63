"""Chat templates as published models have them, shortened, for tiny models."""

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}"
)
"""As Qwen2's."""
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
"""As Llama 2's: special tokens by name, a refused order of roles, a text that ends with the end of text."""
THINKING = (
    "{%- set ns = namespace(last=0) %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}\n"
    "{%- endfor %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' and loop.index0 > ns.last %}\n"
    "        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}\n"
    "        {{- message.content + '<|im_end|>\\n' }}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endif %}"
)
"""As Qwen3's: earlier answers are rendered without the empty reasoning of the last one."""
EXOTIC = (
    "{%- macro turn(message) %}{{ message | tojson(indent=1) }}{% endmacro %}"
    "{{ bos_token }}{{ strftime_now('%Y') }}{% for message in messages %}"
    "{% if message.role == 'system' %}{% continue %}{% endif %}"
    "{{ turn(message) }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ dict(a=1) | tojson }}{% endif %}"
)
"""Filters, macros, loop controls, the date, and blocks of generation."""
OPENED_THINKING = CHATML.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}")
"""As DeepSeek-R1's and QwQ's: a response begins with an opened reasoning, which later turns do not have."""
SPLIT_THINKING = THINKING.replace(
    "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}\n        {{- message.content",
    "{%- set parts = message.content.split('</think>') %}\n"
    "        {{- '<|im_start|>assistant\\n<think>\\n' + (parts[0] if parts[1:] else '') }}\n"
    "        {{- '\\n</think>\\n\\n' }}\n"
    "        {{- parts[-1].lstrip('\\n')",
)
"""As Qwen3's: reasoning in a response is rendered in its own place."""
