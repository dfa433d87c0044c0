"""Makes gptqmodel_*.safetensors: checkpoints of a tiny model that GPTQModel 7.6.0 quantized and saved, all tensors, config.json as their metadata.

GPTQMODEL_CPU_WORKERS=2 PYTHONPATH=tests python make_gptqmodel.py      (in an environment with GPTQModel)
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
CASES = {"sym": (True, False, "gptq"), "asym_v2": (False, False, "gptq_v2"), "sym_order": (True, True, "gptq")}


def main() -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    for name, (symmetric, ordered, version) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            source = tiny.make(Path(folder) / "source", layers=1, hidden=64, intermediate=96, heads=2, kv_heads=1)
            settings = QuantizeConfig(bits=4, group_size=32, sym=symmetric, desc_act=ordered, format=version, device="cpu", offload_to_disk=False)
            model = GPTQModel.load(str(source), settings, dtype=torch.float32)
            rows = torch.randint(3, 380, (8, 64), generator=torch.Generator().manual_seed(0)).tolist()
            model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1)
            model.save(f"{folder}/out")
            tensors = {n: t for file in Path(folder, "out").glob("*.safetensors") for n, t in load_file(file).items()}
            config = json.loads(Path(folder, "out", "config.json").read_text())
            save_file({n: t.half() if t.dtype == torch.float32 else t for n, t in tensors.items()}, HERE / f"gptqmodel_{name}.safetensors", {"config": json.dumps(config)})


if __name__ == "__main__":
    main()
