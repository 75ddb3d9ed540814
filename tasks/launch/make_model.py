"""Writes one tiny model with random weights: ``python make_model.py CONFIG TEMPLATE FOLDER``.

Run by the engine environment's Python, which has torch, transformers and tokenizers; imports
nothing of this project. Weights and training text come from generators whose streams do not depend
on processor or thread count, so that two machines give the same bytes.
"""

from __future__ import annotations

import json
import os
import random
import sys
from itertools import accumulate
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

SEED = 20260801
VOCABULARY = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINKING = ("<think>", "</think>")
#: Words of the invented language, and words of the text that is made of them.
WORDS = 3000
TEXT_WORDS = 40_000


def training_text() -> list[str]:
    """Return lines of an invented language: syllables, Zipf's law, sentences and figures.

    No empty line: two line breaks then stay two tokens, as the chat template's lengths assume.
    """
    draw = random.Random(SEED)
    onsets = ["", *"bcdfghjklmnprstvwz", "br", "ch", "cl", "dr", "fl", "pr", "sh", "st", "th", "tr"]
    nuclei = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]
    codas = ["", "", "", *"dklmnrst", "ng", "nt", "rd", "st"]

    def pick(choices: list[str]) -> str:
        return choices[int(draw.random() * len(choices))]

    def word() -> str:
        parts = (
            pick(onsets) + pick(nuclei) + pick(codas) for _ in range(1 + int(draw.random() * 3))
        )
        return "".join(parts)

    words = [word() for _ in range(WORDS)]
    weights = list(accumulate(1 / (rank + 2) for rank in range(WORDS)))
    lines: list[str] = []
    sentence: list[str] = []
    for drawn in draw.choices(words, cum_weights=weights, k=TEXT_WORDS):
        sentence.append(str(int(draw.random() * 10_000)) if draw.random() < 0.03 else drawn)
        if len(sentence) >= 5 and draw.random() < 0.2:
            lines.append(" ".join(sentence).capitalize() + pick([".", ".", "?", "!"]))
            sentence = []
        elif draw.random() < 0.08:
            sentence[-1] += ","
    return lines


def write_tokenizer(template: Path, folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the text above and write it with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(THINKING),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in THINKING])
    if (size := tokenizer.get_vocab_size()) != VOCABULARY:
        raise SystemExit(f"the tokenizer has {size} tokens, wanted {VOCABULARY}")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template.read_text()
    fast.save_pretrained(folder)


def write_weights(config: Path, folder: Path) -> None:
    """Write random bf16 weights of the model the configuration describes."""
    import numpy
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads(config.read_text())
    kind = settings["model_type"]
    values = {key: value for key, value in settings.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    model = model.to(torch.bfloat16)
    stream = numpy.random.Generator(numpy.random.PCG64(SEED))
    spread = settings["initializer_range"]
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim >= 2:
                drawn = stream.standard_normal(tuple(weight.shape), dtype=numpy.float32) * spread
                weight.copy_(torch.from_numpy(drawn))
            elif name.endswith("A_log"):
                weight.copy_(torch.linspace(1, 16, weight.numel()).log())
            elif name.endswith("dt_bias"):
                weight.fill_(1.0)
    model.save_pretrained(folder)


def main() -> None:
    """Write configuration, weights, tokenizer and generation settings into FOLDER."""
    config, template, folder = (Path(argument) for argument in sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(config, folder)
    write_tokenizer(template, folder)
    # The shipped file is what is served and what predictions read: byte for byte the same.
    (folder / "config.json").write_bytes(config.read_bytes())
    generation = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


if __name__ == "__main__":
    main()
