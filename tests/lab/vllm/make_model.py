"""Make a tiny chat model, the same one every time, and write it to stdout as a tar archive.

Runs inside the vLLM image. The weights are random, so it answers nonsense made of the words of
TEXT, but always the same nonsense: with one rank and with two, if tensor parallelism computes the
right thing.
"""

# torch and transformers are installed in the image only.
# mypy: ignore-errors

import sys
import tarfile
import tempfile

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 512
TEXT = "the quick brown fox jumps over the lazy dog while two small hosts share one large model"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_model(folder: str, words: list[int]) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config)
    # Let whole words win: most other tokens are bytes that mean nothing by themselves. And let
    # them win clearly, so that rounding decides nothing.
    wanted = torch.zeros(VOCABULARY, 1)
    wanted[words] = 4
    model.lm_head.weight.data *= wanted
    model.to(torch.bfloat16).save_pretrained(folder)


def save_tokenizer(folder: str) -> list[int]:
    """Save the tokenizer, and return the ids of the words in TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    ids = [fast.encode(f" {word}", add_special_tokens=False) for word in sorted(set(TEXT.split()))]
    return [word[0] for word in ids if len(word) == 1]


def readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode = 0o755 if member.isdir() else 0o644
    member.uid = member.gid = 0
    return member


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, words=save_tokenizer(folder))
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
            archive.add(folder, arcname="tiny", filter=readable)


if __name__ == "__main__":
    main()
