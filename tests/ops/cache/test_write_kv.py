import pytest
import torch

from cairn.ops.cache.write_kv import write_kv


@pytest.mark.parametrize("name", ["reference", "index_copy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 3])
def test_every_slot_and_no_other(name, dtype, heads):
    g = torch.Generator().manual_seed(heads)
    pages, size, dim = 7, 5, 4
    caches = [torch.full((pages, heads, size, dim), torch.nan, dtype=dtype) for _ in range(2)]
    location = torch.randperm(pages * size, generator=g)[:12]
    location[[2, 7]] = torch.tensor([-1, -9])
    k, v = (torch.randn(12, heads, dim, generator=g).to(dtype) for _ in range(2))
    write_kv.using(name)(k, v, *caches, location)
    written = {int(at): token for token, at in enumerate(location) if at >= 0}
    for cache, given in zip(caches, (k, v), strict=True):
        for page in range(pages):
            for offset in range(size):
                line = cache[page, :, offset]
                if page * size + offset in written:
                    assert torch.equal(line, given[written[page * size + offset]])
                else:
                    assert bool(line.isnan().all())


def test_strided_keys():
    qkv = torch.randn(3, 6, 8)
    caches = [torch.zeros(2, 2, 4, 8) for _ in range(2)]
    write_kv(qkv[:, 2:4], qkv[:, 4:], *caches, torch.tensor([0, 5, 7]))
    assert torch.equal(caches[0][1, :, 1], qkv[1, 2:4])
    assert torch.equal(caches[1][1, :, 3], qkv[2, 4:])
