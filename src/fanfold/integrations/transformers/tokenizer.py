"""The tokenizer beside a checkpoint, and the tokens of a text."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fanfold.errors import ArgumentError, CorruptFileError, MissingFileError, UnsupportedError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "spiece.model")


def load_tokenizer(checkpoint: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint.

    Raises:
        MissingFileError: the folder has no file of a tokenizer.
        CorruptFileError: transformers can't read it.
    """
    folder = Path(checkpoint)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise MissingFileError(
            f"tokenizer of {folder}",
            found="no folder" if not folder.is_dir() else "none of its files",
            expected=f"one of {', '.join(TOKENIZER_FILES)}",
            next_step="Name the model's folder, and copy the files of the base model's tokenizer there.",
        )
    try:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(str(folder)))
    except Exception as error:  # transformers and tokenizers raise many unlike classes here, Exception among them
        raise CorruptFileError(
            f"tokenizer of {folder}",
            found=f"{type(error).__name__}: {error}",
            expected="files that transformers' AutoTokenizer reads",
            next_step="Fetch the tokenizer's files of the base model again.",
        ) from error


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool = False) -> list[int]:
    """The ids of one text; a start token that the tokenizer has but doesn't add by itself is put in front.

    Args:
        tokenizer: of the model.
        text: what to read.
        chat: as a user's message in the chat template.

    Raises:
        ArgumentError: there is no token.
        UnsupportedError: `chat` with a tokenizer that has no chat template.
    """
    if chat:
        if not tokenizer.chat_template:
            raise UnsupportedError(
                f"tokenizer {tokenizer.name_or_path}",
                found="no chat template",
                expected="a chat template in tokenizer_config.json or chat_template.jinja",
                next_step="Leave --chat (chat=True) out; the prompt is then continued as it stands.",
            )
        message = [{"role": "user", "content": text}]
        text = cast(str, tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    ids = cast(list[int], tokenizer(text, add_special_tokens=not chat)["input_ids"])
    start = cast(int | None, tokenizer.bos_token_id)
    if not chat and start is not None and ids[:1] != [start]:
        ids = [start, *ids]
    if not ids:
        raise ArgumentError(
            "prompt",
            found=repr(text),
            expected="at least one token",
            next_step="Give the prompt some text; this tokenizer has no start token.",
        )
    return ids
