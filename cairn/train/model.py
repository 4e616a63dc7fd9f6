"""The model for training: whole sequences, differentiable, parameters with the published names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from cairn.errors import BadConfig
from cairn.layers.rotary import Rotary
from cairn.models.decoder import Decoder
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.rotary.head_norm_rope import rotated
from cairn.specs.ffn import DenseFfn
from cairn.specs.gqa import GqaSpec
from cairn.specs.hils import HilsSpec
from cairn.specs.model import LayerSpec, ModelSpec
from cairn.train.sequence import sequence_attention
from cairn.train.tasks import ANSWER

PLAIN_PAGE = 64
"""Page size used for models without pages; sequence lengths are multiples of it."""


class Norm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps) over the last dimension, statistics in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        # The PyTorch definition, because the kernels have no backward pass.
        return rmsnorm.reference(x, self.weight, self.eps)


class Linear(nn.Linear):
    """A matrix kept in float32 and multiplied in the input's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return functional.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Projections of one layer, with the modules that a checkpoint names."""

    def __init__(self, hidden: int, mixer: GqaSpec) -> None:
        super().__init__()
        dim = mixer.head_dim
        self.q_proj = Linear(hidden, mixer.num_heads * dim)
        self.k_proj = Linear(hidden, mixer.num_kv_heads * dim)
        self.v_proj = Linear(hidden, mixer.num_kv_heads * dim)
        self.o_proj = Linear(mixer.num_heads * dim, hidden)
        self.q_norm, self.k_norm = Norm(dim, mixer.qk_eps), Norm(dim, mixer.qk_eps)
        self.hils = mixer if isinstance(mixer, HilsSpec) else None
        if self.hils is not None:
            rank = self.hils.lora_rank
            self.lmk_q_proj = nn.Sequential(
                Linear(hidden, rank), Linear(rank, mixer.num_heads * dim)
            )
            self.lmk_q_norm = Norm(dim, mixer.qk_eps)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, inter), Linear(hidden, inter)
        self.down_proj = Linear(inter, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One block, in the two halves between which its attention runs.

    Args:
        spec: the model.
        layer: its entry for this layer.
        page_size: S.
    """

    def __init__(self, spec: ModelSpec, layer: LayerSpec, page_size: int) -> None:
        super().__init__()
        mixer, ffn, hidden = layer.mixer, layer.ffn, spec.hidden_size
        assert isinstance(mixer, GqaSpec) and isinstance(ffn, DenseFfn)
        self.input_layernorm = Norm(hidden, layer.norm.eps)
        self.self_attn = Attention(hidden, mixer)
        self.post_attention_layernorm = Norm(hidden, layer.norm.eps)
        self.mlp = MLP(hidden, ffn.intermediate)
        self.dim, self.groups, self.page_size = mixer.head_dim, mixer.num_kv_heads, page_size

    def project(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, ...]:
        """x [T, hidden], whole pages -> q, k, v [T, h, d]; in a landmark layer also the landmark
        query z [T, h_q, d] and the pages' summaries, key [T / S, h_q, d] and bias [T / S, h_q]."""
        own = self.self_attn
        x = self.input_layernorm(x)
        raw = own.q_proj(x)
        q, k, v = (y.unflatten(-1, (-1, self.dim)) for y in (raw, own.k_proj(x), own.v_proj(x)))
        q, k = (rotated(y.float(), cos_sin).to(y.dtype) for y in (own.q_norm(q), own.k_norm(k)))
        if own.hils is None:
            return q, k, v
        # The raw query projection is added to the low-rank form, before any norm.
        z = (own.lmk_q_proj(x) + raw).unflatten(-1, (-1, self.dim))
        z = own.lmk_q_norm(z)
        z = rotated(z.float(), cos_sin).to(z.dtype)
        return q, k, v, z, *self._summaries(k, z)

    def _summaries(self, k: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Summary key of each page, pooled with its landmark's query, and the entropy of the
        pooling weights."""
        keys = k.unflatten(0, (-1, self.page_size))[:, :-1]
        query = z.unflatten(0, (-1, self.page_size))[:, -1].unflatten(1, (self.groups, -1))
        logits = torch.einsum("ngmd,nsgd->ngms", query, keys).float() * self.dim**-0.5
        logs = logits.log_softmax(-1)
        p = logs.exp()
        key = torch.einsum("ngms,nsgd->ngmd", p.to(k.dtype), keys)
        return key.flatten(1, 2), -(p * logs).sum(-1).flatten(1, 2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after attention's output [T, h_q d] and the MLP."""
        x = x + self.self_attn.o_proj(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


@dataclass(frozen=True, slots=True)
class Forward:
    """Outputs of a forward pass for the user tokens.

    Attributes:
        hidden: [B, U, hidden], after the final norm.
        page_mass: [B, U] float32, fraction of attention on selected pages, mean over landmark
            layers and heads.
    """

    hidden: Tensor
    page_mass: Tensor


class Body(nn.Module):
    """Embedding, layers and final norm, with the modules that a checkpoint names."""

    def __init__(self, spec: ModelSpec, page_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.embedding_rows, spec.hidden_size)
        self.layers = nn.ModuleList(Layer(spec, layer, page_size) for layer in spec.layers)
        self.norm = Norm(spec.hidden_size, spec.norm.eps)


class TrainedModel(nn.Module):
    """A HiLS model, or its dense twin.

    Args:
        spec: what the model is.
        seed: of the initial weights.

    Raises:
        BadConfig: a model of the family that is not trained here.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        super().__init__()
        _check(spec)
        self.spec = spec
        self.page_size = spec.chunk_size or PLAIN_PAGE
        self.model = Body(spec, self.page_size)
        if not spec.tied:
            self.lm_head = Linear(spec.hidden_size, spec.head_rows)
        self._rotaries = [
            None if mixer.rotary is None else Rotary(mixer.rotary) for mixer in gqa_mixers(spec)
        ]
        self._angles: dict[tuple[int, int], list[Tensor | None]] = {}
        self._project: Callable[..., tuple[Tensor, ...]] = Layer.project
        self._finish: Callable[..., Tensor] = Layer.finish
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        """Initialise matrices so that they keep the variance of their input; output projections
        start smaller."""
        generator = torch.Generator().manual_seed(seed)
        small = ("o_proj.weight", "down_proj.weight", "lmk_q_proj.1.weight")
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() < 2:
                    continue
                scale = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                scale *= 0.1 if name.endswith(small) else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)

    def compile_halves(self) -> None:
        """Compile the parts of a layer before and after attention, so that elementwise operations
        are fused."""
        # torch.compile specialises for plain and landmark layers and for each number of slots.
        torch._dynamo.config.recompile_limit = 64
        self._project = torch.compile(Layer.project, dynamic=False)
        self._finish = torch.compile(Layer.finish, dynamic=False)

    def slots(self, ids: Tensor) -> Tensor:
        """ids [B, U] with a landmark inserted after every S - 1 tokens: [B, L]; U is a multiple of
        S - 1."""
        if not self.spec.landmarks:
            return ids
        pages = ids.unflatten(1, (-1, self.page_size - 1))
        landmark = torch.full_like(pages[..., :1], self.spec.landmark_id)
        slots: Tensor = torch.cat([pages, landmark], -1).flatten(1)
        return slots

    def tokens(self, x: Tensor) -> Tensor:
        """Elements of x [B, L, ...] at user tokens: [B, U, ...]."""
        if not self.spec.landmarks:
            return x
        pages: Tensor = x.unflatten(1, (-1, self.page_size))
        return pages[:, :, :-1].flatten(1, 2)

    def angles(self, batch: int, length: int) -> list[Tensor | None]:
        """[cos | sin] [batch * length, d] of all layers; computed once, outside of captured
        graphs."""
        device = self.model.norm.weight.device
        if (batch, length) not in self._angles:
            slot = torch.arange(length, device=device)
            # A landmark has the position of the next user token.
            position = slot - slot // self.page_size if self.spec.landmarks else slot
            self._angles[batch, length] = [
                None if rotary is None else rotary.cos_sin(position, torch.float32).repeat(batch, 1)
                for rotary in self._rotaries
            ]
        return self._angles[batch, length]

    def forward(self, ids: Tensor, topk: int, dtype: torch.dtype) -> Forward:
        """Run whole sequences.

        Args:
            ids: [B, U], U whole pages less their landmarks.
            topk: pages a query selects.
            dtype: of the computation; parameters stay float32.
        """
        slots = self.slots(ids)
        batch, length = slots.shape
        x = functional.embedding(slots.flatten(), self.model.embed_tokens.weight).to(dtype)
        masses = []
        mixers = gqa_mixers(self.spec)
        layers = zip(self.model.layers, mixers, self.angles(batch, length), strict=True)
        for layer, mixer, cos_sin in layers:
            parts = self._project(layer, x, cos_sin)
            attended, mass = self._attend(mixer, batch, parts, topk)
            if isinstance(mixer, HilsSpec):
                masses.append(mass.mean(-1))
            x = self._finish(layer, x, attended.flatten(0, 1).flatten(1))
        hidden = self.tokens(self.model.norm(x).unflatten(0, (batch, length)))
        mass = torch.stack(masses).mean(0) if masses else x.new_zeros(batch, length).float()
        return Forward(hidden, self.tokens(mass))

    def _attend(
        self, mixer: GqaSpec, batch: int, parts: tuple[Tensor, ...], topk: int
    ) -> tuple[Tensor, Tensor]:
        own: list[Tensor | None] = [part.unflatten(0, (batch, -1)) for part in parts]
        own += [None] * (6 - len(own))
        q, k, v, z, key, bias = own
        assert q is not None and k is not None and v is not None
        if isinstance(mixer, HilsSpec):
            return sequence_attention(
                q, k, v, z, key, bias, self.page_size, mixer.local_window, topk, mixer.softmax1
            )
        if mixer.window is None and not (mixer.mask_landmarks and self.spec.landmarks):
            return _causal(q, k, v), q.new_zeros(q.shape[:3], dtype=torch.float32)
        return sequence_attention(
            q,
            k,
            v,
            None,
            None,
            None,
            self.page_size,
            mixer.window or q.shape[1],
            aligned=False,
            mask_landmarks=mixer.mask_landmarks and self.spec.landmarks,
        )

    @property
    def table(self) -> Tensor:
        """[V, hidden], the output head."""
        weight = self.model.embed_tokens.weight if self.spec.tied else self.lm_head.weight
        return weight[: self.spec.vocab_size]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by PyTorch: q [B, L, h_q, d], k and v [B, L, h_kv, d].

    On a GPU its gradients are summed in any order, so runs are not bitwise reproducible.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2)


def losses(
    hidden: Tensor, table: Tensor, page_mass: Tensor, targets: Tensor, classes: Tensor
) -> Tensor:
    """Losses and metrics, each a mean over its tokens: float32 [4].

    Args:
        hidden: [T, hidden]; table: [V, hidden]; page_mass: [T] float32.
        targets: [T] int64, the next tokens; classes: [T], of the next tokens.
    Returns:
        Cross-entropy of text and of answers in nats, accuracy on answer tokens, page mass on text
        tokens.
    """
    logits = functional.linear(hidden, table.to(hidden.dtype)).float()
    cross = functional.cross_entropy(logits, targets, reduction="none")
    text, answer = (classes == 0).float(), (classes == ANSWER).float()
    texts, answers = text.sum().clamp(min=1), answer.sum().clamp(min=1)
    right = (logits.argmax(-1) == targets).float()
    return torch.stack(
        [
            (cross * text).sum() / texts,
            (cross * answer).sum() / answers,
            (right * answer).sum() / answers,
            (page_mass * text).sum() / texts,
        ]
    )


def gqa_mixers(spec: ModelSpec) -> list[GqaSpec]:
    """The attention of every layer; models that train have no other mixers."""
    return [mixer for mixer in spec.mixers if isinstance(mixer, GqaSpec)]


def selecting_mixer(spec: ModelSpec) -> HilsSpec | None:
    """The mixer of the landmark layers, which all have the same one; None without such layers."""
    return next((mixer for mixer in spec.mixers if isinstance(mixer, HilsSpec)), None)


def _check(spec: ModelSpec) -> None:
    """Raise BadConfig, with the field's name, for configs that this module does not implement."""
    mixers = gqa_mixers(spec)
    hils = selecting_mixer(spec)
    wrong = {
        "model_type": spec.architecture != "qwen_hils",
        "enable_external_lmk_embed": spec.end_embedding is not None,
        "attention_bias": any(mixer.bias for mixer in mixers),
        "layerwise_qk_norm": any(mixer.qk_norm != "head" for mixer in mixers),
        "use_hope": any(mixer.rotary and mixer.rotary.rounded for mixer in mixers),
        "insert_landmarks": hils is not None and not spec.landmarks,
    }
    if hils is not None:
        wrong |= {
            "enable_prior_query": hils.summary != "prior" or not hils.bias_by_entropy,
            "shared_q_c": hils.shared_query,
            "compressed_lmk_k": hils.group_query,
            "enable_lmk_q_proj": hils.lmk_q != "lora" or hils.shared_lmk_q_norm,
            "layerwise_lmkq_norm": hils.lmk_q_norm != "head",
        }
    found = [name for name, is_wrong in wrong.items() if is_wrong]
    if found:
        raise BadConfig(
            f"config: {found[0]} has a value that is served but not trained here",
            "Start from the config of a shipped recipe",
        )


def check_names(model: TrainedModel) -> None:
    """Raise AssertionError unless the parameters are exactly the tensors of a checkpoint."""
    with torch.device("meta"):
        weights = Decoder(model.spec, torch.float32).weights()
    wanted = {weight.source: weight.shape for weight in weights if weight.parameter is not None}
    found = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert found == wanted, set(found.items()) ^ set(wanted.items())
