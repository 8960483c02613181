"""Model folders with a tokenizer and a chat template, and no weights: three ways in which real templates behave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# SmolLM2-Instruct's.
SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# As Qwen3's: reasoning is written after the last question only, results that follow each other are one turn, and an
# answer that is the last message gets an empty thought.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer in <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.seeking and message.role == 'user' %}
        {%- set ns.seeking = false %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# As Llama 3's: one call an answer, its arguments a mapping, tools in the first question, another end for each message.
LLAMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond as {"name": name, "parameters": arguments}.\\n\\n' }}
    {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": {' }}
        {%- for key, value in call.arguments | items %}
            {{- '"' + key + '": ' + (value | tojson) + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- '}}<|eot_id|>' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

TEMPLATES = {"smol": SMOL, "qwen": QWEN, "llama": LLAMA}
_CONTROL = {
    "smol": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
END = {"smol": "<|im_end|>", "qwen": "<|im_end|>", "llama": "<|eot_id|>"}
_TEXT = (
    'The quick brown fox. {"name": "add", "arguments": {"a": 1, "b": 2.5}} user assistant system tool\n\n'
    "result is true false null, HAVING lunch in Paris; path/to/file.py: error on line 12\n<think> </think> "
)


def write_format(folder: Path, name: str, *, template: str | None = None) -> Path:
    """A model folder in the manner of `name`: smol, qwen or llama."""
    folder.mkdir(parents=True, exist_ok=True)
    markers = _MARKERS if name == "qwen" else ()
    byte_level(_CONTROL[name], markers).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template or TEMPLATES[name], encoding="utf-8")
    tokens = {"bos_token": "<|begin_of_text|>"} if name == "llama" else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens), encoding="utf-8")
    return folder


def write_library_format(folder: Path) -> Path:
    """As Qwen3's: tools are introduced in the words of the ``renderers`` library, which are the template's."""
    from renderers import qwen3

    head, foot = (json.dumps(text)[1:-1].replace("'", "\\'") for text in (qwen3._TOOLS_HEADER, qwen3._TOOLS_FOOTER))
    template = QWEN.replace("'# Tools\\n<tools>'", f"'{head}'")
    template = template.replace(
        "'\\n</tools>\\nAnswer in <tool_call></tool_call>.<|im_end|>\\n'", f"'{foot}<|im_end|>\\n'"
    )
    write_format(folder, "qwen", template=template.replace('\\"', '"'))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


def byte_level(control: Sequence[str], markers: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE with some merges: any text has ids, and most have several."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=list(control), show_progress=False
    )
    made.train_from_iterator([_TEXT] * 4, trainer)
    made.add_tokens(list(markers))
    return made


def spelled_out(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` a byte each: another way to write it than `tokenizer` itself would."""
    letters = byte_letters()
    return [tokenizer.token_to_id(letters[byte]) for byte in text.encode()]


def byte_letters() -> dict[int, str]:
    """GPT-2's spelling of bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(0x100 + number) for number, byte in enumerate(others)}
