"""`steelyard fit` and `sy.fit`, from a configuration, a script and a model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import steelyard as sy
from steelyard.api import ConfigRequest
from steelyard.capture.deep import eager_levels as deep_levels
from steelyard.capture.deep.eager_levels import eager_levels
from steelyard.capture.deep.truncate import cut
from steelyard.cli import main
from steelyard.measure.operators.memory import meter_once
from steelyard.plans.memory_fit import Capacity, FitVerdict

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
PARTS = ("weight", "gradient", "state", "working", "allocator")
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip


def written(folder: Path, **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA_8B | changes))
    return str(path)


def fitted(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["fit", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_full_fine_tuning_of_eight_billion_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = fitted(capsys, written(tmp_path), "--gpu", "RTX-4090")
    assert (code, found["verdict"], found["device"]) == (3, "does not fit", "RTX-4090")
    # 8,030,261,248 weights of 2 bytes; AdamW keeps two of these for each.
    assert found["weight_bytes"] == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    assert found["gradient_bytes"] == 2 * 8_030_261_248
    assert found["state_bytes"] == pytest.approx(4 * 8_030_261_248, rel=1e-6)
    needed = [found[f"{part}_bytes"] for part in PARTS]
    assert sum(needed) == found["needed_bytes"]
    changes = [lever["changes"] for lever in found["would_fit"]]
    assert any(names[0] == "LoRA of rank 16" for names in changes)
    assert all(lever["needed_bytes"] < found["usable_bytes"] for lever in found["would_fit"])


def test_adapters_fit_where_all_weights_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path)
    code, found = fitted(capsys, config, "--gpu", "A100-40", "--lora", "16", "--sequence", "1024")
    assert (code, found["verdict"], found["would_fit"]) == (0, "fits", [])
    # PEFT adapts query and value projections: 32 blocks of 16 x (4096 + 4096 + 4096 + 1024).
    assert found["state_bytes"] == pytest.approx(2 * 4 * 32 * 16 * 13312, rel=1e-3)


@pytest.mark.slow
def test_several_gpus_shard_weights_and_state_and_divide_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path)
    _, one = fitted(capsys, config, "--gpu", "RTX-4090", "--batch", "2")
    _, found = fitted(capsys, config, "--gpu", "4xRTX-4090", "--batch", "8")
    assert (found["devices"], found["relative_error"]) == (4, 0.2)
    assert (one["devices"], one["gathered_bytes"]) == (1, 0)
    for part in ("weight", "state"):
        assert found[f"{part}_bytes"] == -(-one[f"{part}_bytes"] // 4)
    # Two samples on each device, as on the one.
    assert found["working_bytes"] == one["working_bytes"]
    # Embeddings and head with their gradients, two blocks, and the gradients of one.
    block = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    assert found["gathered_bytes"] == 4 * (2 * 128256 * 4096 + 4096) + 3 * block
    devices = [c for lever in found["would_fit"] for c in lever["changes"] if " x " in c]
    assert devices
    assert all(change.endswith(", 1 sample each") for change in devices)
    _, cluster = fitted(capsys, config, "--cluster", "dgx-h100", "--batch", "8")
    assert (cluster["devices"], cluster["verdict"]) == (8, "fits")


@pytest.mark.slow
def test_changes_say_the_time_they_add_as_a_share_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
             "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip
    config = written(tmp_path, **sizes)
    _, found = fitted(capsys, config, "--gpu", "RTX-4060")
    shares = {tuple(lever["changes"]): lever["step_share"] for lever in found["would_fit"]}
    changes = ("optimizer state in host memory", "activation checkpointing of each block")
    device = sy.Cluster.gpu("RTX-4060").device
    assert device.host_link is not None
    # AdamW keeps two values of each weight, which go out and come in; 2,048 tokens.
    transfers = 2 * 2 * found["weight_bytes"] / device.host_link.bytes_per_second
    products = 6 * 2048 * found["weight_bytes"] / 2 / (0.4 * dict(device.peaks)["bfloat16"])
    # Recomputation takes less than a third: the head, and the last product of a block, are not
    # run again. Attention makes the step longer than the products with weights.
    share = shares[changes]
    assert 0.8 * transfers / products + 0.15 < share < transfers / products + 1 / 3
    assert shares["LoRA of rank 16",] is None
    # No rate of bf16 is declared for a T4, so that transfers have nothing to be compared with.
    _, found = fitted(capsys, config, "--gpu", "T4", "--batch", "8")
    shares = {tuple(lever["changes"]): lever["step_share"] for lever in found["would_fit"]}
    assert shares[changes] is None
    assert 0.15 < shares["1024 tokens", "activation checkpointing of each block"] < 1 / 3


def test_blocks_with_adapters_are_measured_like_other_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 200, **SIZES}))
    workload = ConfigRequest(path=path, batch=2, sequence=16, lora=4).workload()
    assert cut(workload.model) is not None
    arguments = (workload.model, workload.loss, workload.first_batch(), workload.optimizer)
    short = eager_levels(*arguments, on_gpu=True)
    monkeypatch.setattr(deep_levels, "cut", lambda _: None)
    whole = eager_levels(*arguments, on_gpu=True)
    assert (short.state_bytes, short.flops) == (whole.state_bytes, whole.flops)
    for phase, error in (("passes", 0), ("update", 0), ("update_each", 0.05)):
        highest = [max(level.nbytes for level in getattr(f, phase)) for f in (short, whole)]
        assert highest[1] <= highest[0] <= (1 + error) * highest[1], phase


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no device was given"),
        (["--gpu", "L4", "--cluster", "dgx-h100"], "--gpu and --cluster both name devices"),
        (["--gpu", "2xL4", "--gpus", "3"], "--gpu 2xL4 and --gpus 3 both give a number"),
        (["--cluster", "dgx-h100", "--gpus", "2"], "--gpus was given with --cluster"),
        (["--gpu", "0xL4"], "--gpus 0 is not possible"),
        (["--gpu", "2xRTX-4091"], "the GPU RTX-4091 is unknown; did you mean RTX-4090?"),
        (["--cluster", "dgx-h10"], "unknown cluster preset dgx-h10"),
    ],
)
def test_unclear_devices_are_refused_in_three_lines(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = fitted(capsys, written(tmp_path), *options)
    assert code == 2
    assert said in found["happened"]
    assert found["expected"]
    assert found["next"]


def test_text_gives_the_verdict_then_the_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", written(tmp_path), "--gpu", "T4", "--optimizer", "sgd"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(str(tmp_path)[:20])
    text = "\n".join(lines)
    assert text.index("does not fit") < text.index("would fit, cheapest first")
    assert "optimizer state" not in text.split("would fit")[0], "plain SGD has none"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZES},
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 4},
        pytest.param(
            {"model_type": "t5", "d_model": 64, "num_layers": 7, "num_heads": 4, "d_ff": 128,
             "decoder_start_token_id": 0}, marks=pytest.mark.slow,
        ),
        {"model_type": "vit", "architectures": ["ViTForImageClassification"], **SIZES},
        {"model_type": "qwen3_moe", **SIZES, "num_experts": 4, "num_experts_per_tok": 2,
         "num_key_value_heads": 2, "moe_intermediate_size": 32},
        {"model_type": "gemma2", **SIZES, "num_key_value_heads": 2, "head_dim": 16},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_other_architectures(
    config: dict[str, Any], precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, found = fitted(
        capsys, str(tmp_path), "--gpu", "T4", "--batch", "2", "--sequence", "32",
        "--precision", precision,
    )  # fmt: skip
    assert (code, found["verdict"]) == (0, "fits")
    assert found["state_bytes"] == pytest.approx(2 * found["weight_bytes"], rel=0.02)
    assert found["working_bytes"] > 0


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({"model_type": "lama"}, [], "unknown model_type 'lama'; did you mean llama?"),
        ({"num_hiden_layers": 2}, [], "the unknown key 'num_hiden_layers'; did you mean"),
        ({"model_type": None}, [], "config.json has no model_type"),
        ({}, ["--precision", "bf17"], "unknown --precision 'bf17'; did you mean bf16?"),
        ({}, ["--optimizer", "adam"], "unknown --optimizer 'adam'; did you mean adamw?"),
        ({}, ["--sequence", "9000"], "--sequence 9000 is longer than the model's 8192 positions"),
        ({"quantization_config": {"bits": 4}}, [], "has a quantization_config"),
        ({"num_attention_heads": "x"}, [], "transformers refuses"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, [], "has dtype bfloat16 and torch_dtype"),
        ({"model_type": "encodec"}, [], "has no model of encodec with a loss"),
    ],
)
def test_bad_configurations_are_refused_in_three_lines(
    config: dict[str, Any], options: list[str], said: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = {} if config.get("model_type") == "encodec" else LLAMA_8B
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given | config))
    code, found = fitted(capsys, str(path), "--gpu", "H100", *options)
    assert (code, found["kind"]) == (2, "BadInput")
    assert said in found["happened"]
    assert found["next"]


def test_a_file_that_is_not_json_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{" * 10_000)
    assert main(["fit", str(path), "--gpu", "H100"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "config.json is not JSON" in said
    assert main(["fit", str(tmp_path / "none.json"), "--gpu", "H100"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "none.json: does not exist expected: the config.json of" in said
    assert said.count("next:") == 1


@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_the_peak_is_that_of_a_real_step(kind: str, recomputes: bool, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "vocab_size": 200, **SIZES}))
    request = ConfigRequest(path=path, batch=8, sequence=64, precision="fp32")
    workload = request.workload()
    levels = eager_levels(
        workload.model, workload.loss, workload.first_batch(), workload.optimizer,
        on_gpu=True, recomputes=recomputes,
    )  # fmt: skip
    model: Any = transformers.AutoModelForCausalLM.from_config(workload.model.config)
    ids = torch.randint(0, 200, (8, 64))
    if recomputes:
        for block in model.base_model.layers:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def passes() -> None:
        workload.loss(model, {"input_ids": ids, "labels": ids}).backward()  # type: ignore[no-untyped-call]

    passes()
    optimizer.step()
    update = meter_once(optimizer.step).peak_bytes
    optimizer.zero_grad()
    measured = meter_once(passes).peak_bytes
    found = max(level.nbytes for level in levels.passes)
    assert found == pytest.approx(measured, rel=0.01)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    beyond = max(level.nbytes for level in levels.update) - gradients - levels.state_bytes
    assert beyond == pytest.approx(update, rel=0.02)


SCRIPT = """
from functools import partial
import torch
import steelyard as sy

def workload():
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(WIDTH)])
        batch = torch.empty(64, 4096)
    return sy.Workload(model, lambda m, x: m(x).mean(), [batch], partial(torch.optim.AdamW))
"""


def test_a_script_is_answered_like_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("WIDTH", "100"))
    code, found = fitted(capsys, str(script), "--gpu", "T4")
    assert code == 3
    assert found["weight_bytes"] == 100 * (4096 * 4096 + 4096) * 4
    script.write_text(SCRIPT.replace("WIDTH", "10"))
    assert fitted(capsys, str(script), "--gpu", "T4")[0] == 0
    assert main(["fit", str(script), "--gpu", "T4", "--lora", "8"]) == 2
    assert "--lora was given for the script" in capsys.readouterr().err


def test_a_gpu_is_the_budget_of_its_plan(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("WIDTH", "8"))
    assert main(["plan", str(script), "--gpu", "t4", "--quiet"]) == 0
    written = (tmp_path / "train.plan.toml").read_text()
    usable = Capacity.of(sy.Cluster.gpu("T4").device).usable_bytes
    assert f"memory = {usable}" in written
    assert 'declared = "T4 (1 T4)"' in written
    assert main(["plan", str(script), "--check", str(tmp_path / "train.plan.toml")]) == 0
    assert main(["plan", str(script), "--cluster", "T4", "--memory", "8GiB"]) == 0
    assert 'memory = "8 GiB"' in (tmp_path / "train.plan.toml").read_text()


def test_a_plan_for_a_gpu_offloads_to_its_host_if_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, plan = tmp_path / "train.py", tmp_path / "train.plan.toml"
    script.write_text(
        SCRIPT.replace("4096, 4096", "1024, 1024").replace("64, 4096", "64, 1024")
        .replace("WIDTH", "4")
    )  # fmt: skip
    arguments = ["plan", str(script), "--gpu", "RTX-4090", "--quiet"]
    assert main([*arguments, "--memory", "1GiB"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the memory of the host of RTX-4090 is not known" in said
    # 64 MiB of weights, gradients and state do not fit; the state goes to the host.
    assert main([*arguments, "--memory", "60MiB"]) == 2 + 1
    plan.unlink()
    assert main([*arguments, "--memory", "60MiB", "--host-memory", "64GiB"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "offload_state optimizer of 4 parameters" in said
    assert "RTX-4090 may offload to 64.0 GiB of its host's memory, over pcie4-x16" in said
    assert 'folder = "the memory of the host"' in plan.read_text()
    assert main(["plan", str(script), "--check", str(plan), "--quiet"]) == 0
    assert "64.0 GiB of its host's memory" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(script), "--host-memory", "64GiB"]) == 2
    assert "--host-memory was given without --gpu" in capsys.readouterr().err


def test_fit_from_python_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    before = [p.clone() for p in model.parameters()]
    found = sy.fit(
        model, lambda m, x: m(x).square().mean(), torch.randn(8, 32),
        optimizer=partial(torch.optim.AdamW, lr=1e-3), gpu="L4",
    )  # fmt: skip
    assert found.verdict is FitVerdict.FITS
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
