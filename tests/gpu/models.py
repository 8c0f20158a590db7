"""Makes the models on the machine that serves them: nothing of theirs has to be carried.

python3 tests/gpu/models.py FOLDER writes FOLDER/tiny, the lab's tiny chat model, and FOLDER/moe:
the configuration of a few layers of Qwen3-30B-A3B in fp8, whose weights vLLM makes up
(--load-format dummy). Runs with that machine's transformers and tokenizers.
"""

# tokenizers and transformers are installed on that machine only.
# mypy: ignore-errors

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

LAYERS = 8
"""Of 48."""
VOCABULARY = 151936
LAB = Path(__file__).parent.parent / "lab" / "vllm" / "make_model.py"
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            *(
                f"model.layers.{n}.{part}"
                for n in range(LAYERS)
                for part in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
            ),
        ],
    },
}
"""config.json of Qwen/Qwen3-30B-A3B-FP8, with fewer layers."""


def tiny(folder: Path) -> None:
    """The lab's model, made by the lab's own program."""
    made = subprocess.run([sys.executable, str(LAB)], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(made)) as archive:
        archive.extractall(folder, filter="data")


def moe(folder: Path) -> None:
    """A configuration, and a tokenizer with a word for each of its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MOE, indent=1))
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w151643", eos_token="w151645"
    )
    fast.save_pretrained(folder)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    tiny(place)
    moe(place / "moe")
