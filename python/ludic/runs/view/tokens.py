"""The text of single tokens, from the tokenizer in the folder of a run."""

from __future__ import annotations

from pathlib import Path

from ludic.runs.view.episodes import Decode


def find_decoder(run: Path) -> Decode | None:
    """The text of one token as the run's tokenizer gives it; None for a run without a tokenizer
    that can be read. No code of the folder is run."""
    if not (run / "model" / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(run / "model", trust_remote_code=False, local_files_only=True)
    except Exception:  # whatever a library raises for files that it cannot read
        return None

    def decode(token: int) -> str:
        try:
            return str(tokenizer.decode([token]))
        except Exception:  # a number that the tokenizer does not have
            return f"<{token}>"

    return decode
