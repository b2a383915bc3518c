"""Inputs of a language model's head, and the truth: whole float64 logits, torch's softmax and autograd."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from spiral_mega.kernels import linear_logprob

Tensors = dict[str, torch.Tensor]
INPUTS = ("hidden", "weight", "bias", "adapter_input", "adapter_weight")
OUTPUTS = ("logprob", "logsumexp", "entropy")


@dataclass(frozen=True)
class Case:
    """T tokens, H features, V vocabulary entries, logits of about `scale`, an adapter of `rank`."""

    T: int
    H: int
    V: int
    dtype: torch.dtype = torch.float32
    scale: float = 3.0
    temperature: float = 1.0
    softcap: float | None = None
    bias: bool = False
    rank: int = 0
    idle: float = 0.0  # share of rows whose upstream gradients are zero
    entropy_gradient: bool = True
    banned: int = 0  # entries with a bias of -inf

    def tensors(self) -> Tensors:
        """Return hidden, weight, targets, bias and adapter if any, and upstream gradients of the outputs [3, T]."""
        generator = torch.Generator().manual_seed(self.T * 7919 + self.V)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(
                self.dtype
            )

        made = {
            "hidden": normal(self.T, self.H),
            "weight": normal(self.V, self.H, scale=self.scale * self.H**-0.5),
            "targets": torch.randint(self.banned, self.V, (self.T,), generator=generator),
        }
        if self.bias or self.banned:
            made["bias"] = normal(self.V)
            made["bias"][: self.banned] = -torch.inf
        if self.rank:
            made |= {
                "adapter_input": normal(self.T, self.rank),
                "adapter_weight": normal(self.V, self.rank, scale=0.5),
            }
        upstream = torch.randn(3, self.T, generator=generator, dtype=torch.float64)
        upstream[:, torch.rand(self.T, generator=generator) < self.idle] = 0
        upstream[2] *= self.entropy_gradient
        return made | {"upstream": upstream}


def options(case: Case) -> dict[str, Any]:
    return {"temperature": case.temperature, "softcap": case.softcap}


def arguments(tensors: Tensors) -> dict[str, Any]:
    """Return the arguments of linear_logprob."""
    adapter = (
        (tensors["adapter_input"], tensors["adapter_weight"])
        if "adapter_input" in tensors
        else None
    )
    kept = {
        name: tensors[name] for name in ("hidden", "weight", "targets", "bias") if name in tensors
    }
    return kept | {"adapter": adapter}


def leaves(tensors: Tensors) -> Tensors:
    return {
        n: t.detach().clone().requires_grad_() if n in INPUTS else t for n, t in tensors.items()
    }


def computed(tensors: Tensors, case: Case, **more: Any) -> Tensors:
    """Return linear_logprob's outputs and its gradients, by the output's and the input's name."""
    tensors = leaves(tensors)
    outputs = linear_logprob(**arguments(tensors), **options(case), **more)
    return _together(list(outputs), tensors, case)


def plain_logits(tensors: Tensors, case: Case) -> torch.Tensor:
    logits = tensors["hidden"] @ tensors["weight"].T
    if "adapter_input" in tensors:
        logits = logits + tensors["adapter_input"] @ tensors["adapter_weight"].T
    if "bias" in tensors:
        logits = logits + tensors["bias"]
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    return logits / case.temperature


def truth(tensors: Tensors, case: Case, dtype: torch.dtype | None = torch.float64) -> Tensors:
    """Return the same from whole logits in `dtype`; None: logits as a model computes them, then float32."""
    tensors = leaves({n: t.to(dtype) if n in INPUTS and dtype else t for n, t in tensors.items()})
    logits = plain_logits(tensors, case)
    logits = logits if dtype else logits.float()
    kept = torch.isfinite(logits).any(0)
    possible = torch.log_softmax(logits[:, kept], -1)
    outputs = [
        torch.log_softmax(logits, -1)[torch.arange(case.T), tensors["targets"]],
        torch.logsumexp(logits, -1),
        -(possible.exp() * possible).sum(-1),
    ]
    return _together(outputs, tensors, case)


def _together(outputs: list[torch.Tensor], tensors: Tensors, case: Case) -> Tensors:
    used = 3 if case.entropy_gradient else 2
    loss = sum(
        (o * u.to(o)).sum() for o, u in zip(outputs[:used], tensors["upstream"][:used], strict=True)
    )
    loss.backward()  # type: ignore[union-attr]
    found = {name: output.detach() for name, output in zip(OUTPUTS, outputs, strict=True)}
    return found | {name: tensors[name].grad for name in INPUTS if name in tensors}  # type: ignore[dict-item]


def assert_accurate(found: Tensors, expected: Tensors) -> None:
    """Assert float32 errors: 2e-6 of the largest log-prob, 1e-5 of the largest gradient and entropy (a sum over V)."""
    errors = relative_errors(found, expected)
    assert all(error <= (2e-6 if key in OUTPUTS[:2] else 1e-5) for key, error in errors.items()), (
        errors
    )


def relative_errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Return each tensor's largest error over its largest value (at least 1 for outputs, which may all be near 0)."""
    errors = {}
    for name, right in expected.items():
        assert found[name].shape == right.shape, name
        if right.numel() == 0:
            continue
        size = float(right.abs().max())
        size = max(size, 1.0) if name in OUTPUTS else max(size, 1e-30)
        errors[name] = float((found[name].double() - right.double()).abs().max()) / size
    return errors


def rms_errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    return {
        n: float((found[n].double() - right.double()).square().mean().sqrt())
        for n, right in expected.items()
    }


RAGGED = {
    "one token": Case(1, 48, 517),
    "ragged": Case(77, 33, 1001, bias=True),
    "temperature": Case(64, 64, 300, temperature=0.7),
    "softcap": Case(40, 32, 400, scale=20.0, softcap=15.0, temperature=1.3, bias=True),
    "adapter": Case(50, 40, 333, rank=5),
    "no entropy gradient": Case(50, 40, 333, entropy_gradient=False),
    "idle rows": Case(90, 40, 333, idle=0.75, bias=True, rank=3),
    "all rows idle": Case(9, 40, 333, idle=1.0),
    "banned entries": Case(30, 24, 600, banned=300),
    "one entry": Case(5, 8, 1),
    "no tokens": Case(0, 16, 100),
}
EXTREME = {
    "huge logits": Case(33, 64, 500, scale=1e4),
    "huge logits, banned entries": Case(33, 64, 500, scale=1e4, banned=70),
}
HALF = {
    f"{str(dtype)[6:]} {name}": replace(case, dtype=dtype)
    for dtype in (torch.bfloat16, torch.float16)
    for name, case in {
        "ragged": Case(150, 136, 1201, rank=8),
        "peaked": Case(130, 128, 900, scale=8.0, idle=0.3, temperature=0.6),
        "softcap": Case(64, 96, 700, scale=10.0, softcap=8.0, bias=True),
    }.items()
}
