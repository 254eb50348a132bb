"""Says what a worker with vLLM serves, and what two of them must have in common to exchange KV.

Owns: the digests. They name vLLM, its version, how it computes and how it divides a block, so that such a worker never
pairs with one of the torch engine, or with one that keeps KV in another form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.core.errors import UnsupportedModel
from services.engine.config import EngineConfig, EngineInfo
from services.kv.layout import token_bytes
from services.vllm.messages import JsonMessage
from services.vllm.slot_memory import SlotMemory

_SAMPLED_BYTES, _NUM_SAMPLES = 1 << 16, 256
"""The size and the number of the pieces, evenly spaced, that are read of a file of weights: all of 100 GB would take
minutes, and checkpoints of different training differ nearly everywhere."""


def identity_of(
    config: EngineConfig, facts: JsonMessage, caches: Mapping[int, JsonMessage], memory: SlotMemory
) -> EngineInfo:
    """Returns what the worker tells of its engine. `facts` are those of the front, `caches` those of the ranks.

    Raises UnsupportedModel if a block does not have the bytes of keys and values for each token.
    """
    folder, dtype = Path(config.model_path), facts["dtype"]
    layers, heads, head_dim = facts["num_layers"], facts["num_kv_heads"], facts["head_dim"]
    num_bytes = facts["block_size"] * token_bytes(layers, heads, head_dim, dtype)
    if num_bytes != memory.block_bytes:
        raise UnsupportedModel(
            f"vLLM's blocks have {memory.block_bytes} bytes for {facts['block_size']} tokens, and keys and values of "
            f"{layers} layers with {heads} heads of {head_dim} have {num_bytes}: Baton hands over no other kind"
        )
    forms = [cache["form"] for _, cache in sorted(caches.items())]
    how = {
        "engine": f"vllm {facts['version']}",
        "sharding": facts["sharding"],
        "forms": forms,
        "backends": sorted({cache["backend"] for cache in caches.values()}),
        "quantization": facts["quantization"],
        "config": facts["config"],
    }
    numerics = f"vLLM {facts['version']}, {dtype}"
    if facts["quantization"] != "none":
        numerics += f", weights {facts['quantization']}"
    return EngineInfo(
        model_id=config.model_id,
        weights_digest=weights_digest(folder),
        config_digest=hashlib.blake2b(json.dumps(how, sort_keys=True).encode(), digest_size=16).hexdigest(),
        numerics=numerics,
        dtype=dtype,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=head_dim,
        block_size=facts["block_size"],
        num_blocks=memory.num_blocks,
        max_model_len=min(facts["max_model_len"], memory.num_blocks * facts["block_size"]),
        vocab_size=facts["vocab_size"],
        eos_token_ids=eos_token_ids(folder),
        device=config.device,
        engine="vllm",
        has_masks=False,
        kernels=f"vLLM {facts['version']}, {', '.join(how['backends'])}, {len(caches)} rank(s)",
    )


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Returns the tokens by which the model ends its output."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if eos is not None:
            return (eos,) if isinstance(eos, int) else tuple(eos)
    return ()


def weights_digest(folder: Path) -> str:
    """Returns a digest of the files of weights, in 32 hex digits."""
    files = sorted(chosen for form in ("*.safetensors", "*.bin", "*.pt") for chosen in folder.glob(form))
    digest = hashlib.blake2b(b"vllm", digest_size=16)
    with ThreadPoolExecutor(4) as readers:
        for name, found in zip(files, readers.map(_digest_of, files), strict=True):
            digest.update(name.name.encode() + b"\0" + found)
    return digest.hexdigest()


def _digest_of(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as file:
        last = max(0, size - _SAMPLED_BYTES)
        for at in range(_NUM_SAMPLES):
            file.seek(last * at // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLED_BYTES))
    return digest.digest()
