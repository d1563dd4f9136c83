"""The 552B release on the meta device: counts against the report, names and shapes of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.accounting import count
from model.config import EngramConfig, LayerKind, NetworkConfig
from model.flash import FlashPolicy
from model.network import Network
from model.presets import preset
from model.quantize import fp8_ue8m0, mxfp4
from model.release import dequantize, from_release, meta_network, to_release


@pytest.fixture(scope="module")
def flash() -> Network:
    return meta_network("flash")


def small() -> Network:
    """Every part that the release has, tiny."""
    engram = EngramConfig(layers=(1,), table_rows=20, max_ngram=3, heads=1, head_dim=32, compressed_vocab=90)
    tiny = preset("flash-tiny").model_dump() | {"width": 64, "expert_width": 32}
    tiny |= {"name": "small", "streams": 2, "engram": engram, "tie_embeddings": False}
    torch.manual_seed(0)
    return Network(NetworkConfig.model_validate(tiny))


def test_parameter_counts_are_those_of_the_report(flash: Network):
    counts = count(flash)
    assert round(counts.backbone / 1e9) == 552
    assert counts.engram == (384_006_168 + 384_016_682) * 256  # 196.6e9, which the report calls 196
    assert round(counts.active_prefill / 1e9) == 8
    assert round(counts.active_decode / 1e9) == 16
    assert {tensor.device.type for tensor in flash.state_dict().values()} == {"meta"}


def test_layer_kinds_are_those_of_the_release(flash: Network):
    kinds = [flash.config.kind(layer) for layer in range(40)]
    assert kinds[:2] == [LayerKind.WINDOW] * 2
    assert [i for i, kind in enumerate(kinds) if kind is LayerKind.FULL] == [2, 8, 14, 20]
    assert [i for i, kind in enumerate(kinds) if kind is LayerKind.REINDEX] == [24, 28, 32, 36]
    assert kinds.count(LayerKind.REUSE) == 30


def test_names_and_shapes_are_those_of_the_release(flash: Network):
    shapes = {name: tuple(tensor.shape) for name, tensor in to_release(flash).items()}
    plain = {
        "attn_norm.weight": (5120,),
        "attn.wq_a.weight": (1280, 5120),
        "attn.q_norm.weight": (1280,),
        "attn.wq_b.weight": (32768, 1280),
        "attn.wkv.weight": (512, 5120),
        "attn.kv_norm.weight": (512,),
        "attn.attn_sink": (64,),
        "attn.wo_a.weight": (8192, 4096),
        "attn.wo_b.weight": (5120, 8192),
        "hc_attn_fn": (24, 20480),
        "hc_attn_base": (24,),
        "hc_attn_scale": (3,),
        "hc_ffn_fn": (24, 20480),
        "hc_ffn_base": (24,),
        "hc_ffn_scale": (3,),
        "ffn_norm.weight": (5120,),
        "ffn.gate.weight": (384, 5120),
        "ffn.gate.bias": (384,),
        "ffn.shared_experts.w1.weight": (2304, 5120),
        "ffn.shared_experts.w2.weight": (5120, 2304),
        "ffn.shared_experts.w3.weight": (2304, 5120),
    }
    for expert in range(384):
        plain |= {
            f"ffn.experts.{expert}.w1.weight": (2304, 5120),
            f"ffn.experts.{expert}.w2.weight": (5120, 2304),
            f"ffn.experts.{expert}.w3.weight": (2304, 5120),
        }
    index = {"attn.indexer.wq_b.weight": (4096, 1280), "attn.indexer.weights_proj.weight": (32, 5120)}
    memory = index | {
        "attn.compressor.wkv.weight": (512, 5120),
        "attn.compressor.norm.weight": (512,),
        "attn.indexer.wk.weight": (128, 512),
        "attn.indexer.k_norm.weight": (128,),
    }
    pairs = memory | {"attn.compressor.wgate.weight": (512, 5120)}
    engram = {
        "engram.wkv.weight": (25600, 6144),
        "engram.q_weight": (4, 5120),
        "engram.k_weight": (4, 5120),
    }
    extra: dict[int, dict[str, tuple[int, ...]]] = {
        1: engram | {"engram.embed.weight": (384_006_168, 256)},
        2: pairs,
        8: pairs,
        14: pairs | engram | {"engram.embed.weight": (384_016_682, 256)},
        20: memory,
        **dict.fromkeys((24, 28, 32, 36), index),
    }
    want: dict[str, tuple[int, ...]] = {
        "embed.weight": (129_280, 5120),
        "head.weight": (129_280, 5120),
        "norm.weight": (5120,),
    }
    for layer in range(40):
        want |= {f"layers.{layer}.{k}": v for k, v in (plain | extra.get(layer, {})).items()}
    assert shapes == want


def test_the_release_maps_back_onto_every_tensor(flash: Network):
    state = from_release(flash, to_release(flash))
    own = {name: tensor.shape for name, tensor in flash.state_dict().items() if name != "compressed_V"}
    assert {name: tensor.shape for name, tensor in state.items()} == own


def test_files_give_the_same_network_back(tmp_path: Path):
    network = small()
    tensors = {name: tensor.contiguous() for name, tensor in to_release(network).items()}
    tensors["layers.0.ffn.gate.bias_vl"] = torch.zeros(4)
    tensors["mtp.0.norm.weight"] = torch.ones(64)
    save_file(tensors, tmp_path / "model.safetensors")
    state = from_release(network, load_file(tmp_path / "model.safetensors"))
    other = small()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["compressed_V"], [])
    for name, tensor in network.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_scales_are_multiplied_in():
    network = small()
    tensors = to_release(network)
    block = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    name = "layers.0.ffn.experts.1.w2"
    codes = torch.tensor([[120], [130]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    state = from_release(network, tensors | {f"{name}.weight": block, f"{name}.scale": codes})
    want = torch.cat((block[:32].float() * 2.0**-7, block[32:].float() * 8.0))
    assert torch.equal(state["layers.0.moe.down"][1], want.T)


def test_stored_rows_are_what_the_quantizers_give():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    amax = x.unflatten(-1, (2, 32)).abs().amax(-1)
    exponents = torch.ceil(torch.log2(amax / 448)).to(torch.int32)
    eights = (x / torch.exp2(exponents.float()).repeat_interleave(32, 1)).to(torch.float8_e4m3fn)
    assert torch.equal(dequantize(eights, (exponents + 127).to(torch.uint8), x.shape), fp8_ue8m0(x))
    exponents = torch.ceil(torch.log2(amax / 6)).to(torch.int32)
    wanted = mxfp4(x)
    levels = wanted / torch.exp2(exponents.float()).repeat_interleave(32, 1)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (levels.abs().unsqueeze(-1) == grid).float().argmax(-1) + 8 * torch.signbit(levels)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    assert torch.equal(dequantize(packed, (exponents + 127).to(torch.uint8), x.shape), wanted)


def test_wrong_checkpoints_are_refused():
    network = small()
    tensors = to_release(network)
    with pytest.raises(ValueError, match="has no norm"):
        from_release(network, {k: v for k, v in tensors.items() if k != "norm.weight"})
    with pytest.raises(ValueError, match=r"norm\.weight is \(65,\)"):
        from_release(network, tensors | {"norm.weight": torch.ones(65)})
    with pytest.raises(ValueError, match="no place for"):
        from_release(network, tensors | {"layers.0.surprise": torch.ones(1)})


def test_nobody_builds_the_release_by_accident():
    with pytest.raises(ValueError, match="too large"):
        FlashPolicy.fresh("flash", seed=0)
