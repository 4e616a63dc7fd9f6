"""KV transfers against the layouts' definitions, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops import gpu
from cairn.ops.registry import force

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 2, 12, 4, 5
SLOTS = PAGE * PAGES
DTYPE = torch.bfloat16
ITEM = HEADS * DIM * DTYPE.itemsize


@pytest.fixture(params=["definition", "kernel"])
def ways(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the definition and with the kernel (interpreted without a GPU)."""
    if request.param == "definition":
        with force("copy_slots=reference"):
            yield
        return
    if device == "cpu":
        if not gpu.INTERPRETED:
            pytest.skip("needs Triton")
        monkeypatch.setattr(ops.kvcacheio.copy_slots.copy_slots, "_chosen", interpreted())
    yield


def interpreted() -> dict:
    op = ops.kvcacheio.copy_slots.copy_slots
    return {"cpu": ([], op.implementations["triton"])}


@dataclass(frozen=True)
class Slots:
    """Layers of keys or values [LAYERS, SLOTS, HEADS, DIM], in all layouts."""

    layers: Tensor

    def lf(self) -> list[Tensor]:
        return [layer.clone() for layer in self.layers]

    def pf(self) -> Tensor:
        return self.layers.transpose(0, 1).contiguous()

    def ph(self) -> Tensor:
        paged = self.layers.view(LAYERS, PAGES, PAGE, HEADS, DIM)
        return paged.permute(1, 3, 2, 0, 4).contiguous()

    def direct(self) -> Tensor:
        return self.layers.view(LAYERS, PAGES, PAGE, HEADS, DIM).transpose(0, 1).contiguous()

    def after(self, source: Slots, read: Tensor, write: Tensor, layers: list[int]) -> Slots:
        """With the tokens of some layers copied, one by one."""
        found = self.layers.clone()
        for layer in layers:
            for r, w in zip(read.tolist(), write.tolist(), strict=True):
                found[layer, w] = source.layers[layer, r]
        return Slots(found)


def drawn(device: str) -> Iterator[Slots]:
    g = torch.Generator().manual_seed(0)
    while True:
        yield Slots(torch.randn(LAYERS, SLOTS, HEADS, DIM, generator=g).to(DTYPE).to(device))


def indices(device: str, count: int = 7) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(count)
    return tuple(torch.randperm(SLOTS, generator=g)[:count].to(device) for _ in range(2))


def table(layers: list[Tensor]) -> Tensor:
    addresses = [layer.data_ptr() for layer in layers]
    return torch.tensor(addresses, dtype=torch.uint64, device=layers[0].device)


def same(got: Tensor | list[Tensor], wanted: Tensor | list[Tensor]) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


KINDS = [("lf", False), ("pf", False), ("ph", False), ("lf", True), ("pf", True)]
"""(layout, whether slots are latents, which have no heads and so no "ph" layout)."""


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize(("layout", "mla"), KINDS)
def test_one_layer(layout: str, mla: bool, count: int, ways: None, device: str) -> None:
    make = drawn(device)
    k, v, into_k, into_v = (next(make) for _ in range(4))
    read, write = indices(device, count)
    layer = 2
    sources = [getattr(x, layout)() for x in (k, v)]
    if layout == "lf":
        sources = [source[layer] for source in sources]
    targets = [x.lf()[layer] for x in (into_k, into_v)]
    where = (read, write, ITEM) if layout == "lf" else (read, write, layer, ITEM, LAYERS * ITEM)
    kwargs = {"page_size": PAGE, "head_num": HEADS} if layout == "ph" else {}
    ending = "" if layout == "lf" else f"_{layout}_lf"
    if mla:
        call = getattr(ops, f"transfer_kv_per_layer_mla{ending}")
        call(sources[0], targets[0], *where, **kwargs)
    else:
        call = getattr(ops, f"transfer_kv_per_layer{ending}")
        call(sources[0], targets[0], sources[1], targets[1], *where, **kwargs)
        same(targets[1], into_v.after(v, read, write, [layer]).layers[layer])
    same(targets[0], into_k.after(k, read, write, [layer]).layers[layer])


@pytest.mark.parametrize("count", [0, 7])
@pytest.mark.parametrize(("layout", "mla"), KINDS)
def test_all_layers(layout: str, mla: bool, count: int, ways: None, device: str) -> None:
    make = drawn(device)
    k, v, into_k, into_v = (next(make) for _ in range(4))
    read, write = indices(device, count)
    sources = [x.lf() for x in (k, v)]
    targets = [getattr(x, layout)() for x in (into_k, into_v)]
    tables = [table(x) for x in sources]
    into = [table(x) for x in targets] if layout == "lf" else targets
    where = (read, write, ITEM) if layout == "lf" else (read, write, ITEM, LAYERS * ITEM)
    kwargs = {"page_size": PAGE, "head_num": HEADS} if layout == "ph" else {}
    ending = "" if layout == "lf" else f"_lf_{layout}"
    every = list(range(LAYERS))
    if mla:
        call = getattr(ops, f"transfer_kv_all_layer_mla{ending}")
        call(tables[0], into[0], *where, LAYERS, **kwargs)
    else:
        call = getattr(ops, f"transfer_kv_all_layer{ending}")
        call(tables[0], into[0], tables[1], into[1], *where, LAYERS, **kwargs)
        same(targets[1], getattr(into_v.after(v, read, write, every), layout)())
    same(targets[0], getattr(into_k.after(k, read, write, every), layout)())


@pytest.mark.parametrize("page", [64, 128])
def test_all_layers_into_large_pages_of_heads(page: int, ways: None, device: str) -> None:
    pages, slots = 3, 3 * page
    shape = (pages, HEADS, page, LAYERS, DIM)
    g = torch.Generator().manual_seed(page)
    k, v = (
        [torch.randn(slots, HEADS, DIM, generator=g).to(DTYPE).to(device) for _ in range(LAYERS)]
        for _ in range(2)
    )
    into = [torch.randn(shape, generator=g).to(DTYPE).to(device) for _ in range(2)]
    read, write = (torch.randperm(slots, generator=g)[: page + 5] for _ in range(2))
    # The last token of a page and the first of the next one are among them.
    write[:2] = torch.tensor([page - 1, page])
    write[2:] = torch.tensor([n for n in range(slots) if n not in (page - 1, page)])[: page + 3]
    wanted = [x.clone() for x in into]
    for r, w in zip(read.tolist(), write.tolist(), strict=True):
        for layer in range(LAYERS):
            for layers, target in ((k, wanted[0]), (v, wanted[1])):
                target[w // page, :, w % page, layer] = layers[layer][r]
    ops.transfer_kv_all_layer_lf_ph(
        *(table(k), into[0], table(v), into[1], read.to(device), write.to(device), ITEM),
        *(LAYERS * ITEM, LAYERS),
        page_size=page,
        head_num=HEADS,
    )
    for got, expected in zip(into, wanted, strict=True):
        same(got, expected)


def test_items_wider_than_a_program(ways: None, device: str) -> None:
    src, dst = torch.randn(2, 6, 1410, device=device)
    wanted = dst.clone()
    wanted[[5, 0]] = src[[1, 4]]
    places = [torch.tensor(x, device=device) for x in ([1, 4], [5, 0])]
    ops.transfer_kv_per_layer_mla(src, dst, *places, 1410 * 4)
    same(dst, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("to_host", [True, False])
def test_host_and_device(to_host: bool, pinned: bool) -> None:
    host = torch.randn(SLOTS, 96)
    host = host.pin_memory() if pinned else host
    near = torch.randn(SLOTS, 96, device="cuda")
    src, dst = (near, host) if to_host else (host, near)
    read, write = indices("cuda")
    wanted = dst.cpu().clone()
    wanted[write.cpu()] = src.cpu()[read.cpu()]
    ops.transfer_kv_per_layer(src, dst, src, dst, read, write, 96 * 4)
    torch.cuda.synchronize()
    same(dst.cpu(), wanted)


def test_direct_merges_runs_and_copies_every_layer(device: str) -> None:
    make = drawn(device)
    source, into = next(make), next(make)
    read = torch.tensor([3, 4, 5, 9, 10, 0], device=device)
    write = torch.tensor([7, 8, 12, 0, 1, 2], device=device)
    layers = into.lf()
    ops.transfer_kv_direct(source.lf(), layers, read, write, PAGE)
    same(torch.stack(layers), into.after(source, read, write, list(range(LAYERS))).layers)


@pytest.mark.parametrize("values", [False, True])
def test_direct_pages(values: bool, device: str) -> None:
    make = drawn("cpu")
    sources = [next(make) for _ in range(1 + values)]
    into = [next(make) for _ in range(1 + values)]
    pages = torch.tensor([[3, 0], [1, 4]])
    read, write = (
        page.repeat_interleave(PAGE) * PAGE + torch.arange(PAGE).repeat(2) for page in pages
    )
    # Some layers from pages on the host.
    near = [layer.to(device) for x in into for layer in x.lf()[1:]]
    ops.transfer_kv_per_layer_direct_pf_lf(
        [x.direct() for x in sources], near, read, write, 1, PAGE
    )
    wanted = [x.after(s, read, write, [1, 2]) for x, s in zip(into, sources, strict=True)]
    same([layer.cpu() for layer in near], [layer for x in wanted for layer in x.lf()[1:]])
    # All layers back to pages on the host.
    far = [x.direct() for x in into]
    layers = [layer.to(device) for x in sources for layer in x.lf()]
    ops.transfer_kv_all_layer_direct_lf_pf(layers, far, read, write, PAGE)
    if device == "cuda":
        torch.cuda.synchronize()
    every = list(range(LAYERS))
    wanted = [x.after(s, read, write, every) for x, s in zip(into, sources, strict=True)]
    same(far, [x.direct() for x in wanted])


K, INTO = torch.zeros(8, 4), torch.zeros(8, 4)
AT = torch.tensor([0, 1])
TABLE = torch.tensor([K.data_ptr()], dtype=torch.uint64)


@pytest.mark.parametrize(
    "argument, given",
    [
        ("src_k", (K.t(), INTO, K, INTO, AT, AT, 16)),
        ("dst_v", (K, INTO, K, torch.zeros(7, 3), AT, AT, 16)),
        ("src_indices", (K, INTO, K, INTO, AT.int(), AT, 16)),
        ("dst_indices", (K, INTO, K, INTO, AT, AT[:1], 16)),
        ("item_size", (K, INTO, K, INTO, AT, AT, 12)),
    ],
)
def test_one_layer_refuses(argument: str, given: tuple) -> None:
    with pytest.raises(BadArgument, match=f"transfer_kv_per_layer: argument `{argument}`"):
        ops.transfer_kv_per_layer(*given)


def test_negative_slots_are_padding(device: str) -> None:
    read, write = (torch.tensor(at, device=device) for at in ([3, -1, 0, 5], [1, 2, -7, 0]))
    for source, target in ((read, write), (write, read)):
        k = torch.arange(6 * 2.0, device=device).view(6, 2)
        into = torch.zeros_like(k)
        ops.transfer_kv_per_layer_mla(k, into, source, target, 8)
        expected = torch.zeros_like(k)
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            if a >= 0 and b >= 0:
                expected[b] = k[a]
        assert torch.equal(into, expected)


def test_others_refuse() -> None:
    with pytest.raises(BadArgument, match="`src`"):
        ops.transfer_kv_per_layer_mla_pf_lf(K, INTO, AT, AT, 1, 16, 16 * 3)
    with pytest.raises(BadArgument, match="`src` holds 2 layers"):
        ops.transfer_kv_per_layer_mla_pf_lf(K, INTO, AT, AT, 2, 16, 32)
    with pytest.raises(BadArgument, match="`src` holds 1 layers, not 2"):
        ops.transfer_kv_per_layer_mla_pf_lf(K, INTO, AT, AT, 1, 16, 16)
    with pytest.raises(BadArgument, match="`dst` holds 1 layers, not 3"):
        ops.transfer_kv_all_layer_mla_lf_pf(TABLE.repeat(3), INTO, AT, AT, 16, 16, 3)
    with pytest.raises(BadArgument, match="`dst` lies on meta"):
        ops.transfer_kv_per_layer_mla(K, INTO.to("meta"), AT, AT, 16)
    with pytest.raises(BadArgument, match="`src_layout_dim`"):
        ops.transfer_kv_per_layer_mla_pf_lf(K, INTO, AT, AT, 0, 16, 24)
    with pytest.raises(BadArgument, match="`head_num`"):
        ops.transfer_kv_per_layer_ph_lf(K, INTO, K, INTO, AT, AT, 0, 16, 16, 2, 3)
    with pytest.raises(BadArgument, match="`src_layers`"):
        ops.transfer_kv_all_layer_mla(K, TABLE, AT, AT, 16, 1)
    with pytest.raises(BadArgument, match="`dst_layers`"):
        ops.transfer_kv_all_layer_mla(TABLE.repeat(2), TABLE, AT, AT, 16, 2)
    with pytest.raises(BadArgument, match="`src_layers` has 2 addresses, not 1"):
        ops.transfer_kv_all_layer_mla(TABLE.repeat(2), TABLE, AT, AT, 16, 1)
    with pytest.raises(BadArgument, match="`dst_layers`"):
        ops.transfer_kv_direct([K], [INTO, INTO], AT, AT, 1)
    with pytest.raises(BadArgument, match="`dst_indices` names slot 8 of 8"):
        ops.transfer_kv_direct([K], [INTO], AT, AT + 7, 1)
    paged = torch.zeros(2, 1, 4, 4)
    with pytest.raises(BadArgument, match="`src_ptrs`"):
        ops.transfer_kv_per_layer_direct_pf_lf([paged], [INTO], AT[:0], AT[:0], 1, 4)
    with pytest.raises(BadArgument, match="`src_indices` has 2 slots"):
        ops.transfer_kv_per_layer_direct_pf_lf([paged], [INTO], AT, AT, 0, 4)


def test_the_kernel_leaves_memory_of_another_device_to_the_definition() -> None:
    def accepts(source: Tensor) -> bool:
        layout = [16, 1, 1]
        copied = (AT, AT, source, INTO, None, None, 16, 1, 0, layout, layout)
        return ops.kvcacheio.copy_slots.copy_slots.accepts("triton", *copied)

    assert accepts(K)
    assert not accepts(K.to("meta"))
