from cairn.bench import machine


def test_cpu_flags(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel name : Some CPU\nflags : fpu avx2 amx_bf16 amx_tile\n")
    cpu = machine.describe_cpu(file)
    assert cpu.model == "Some CPU"
    assert cpu.flags == ("amx_tile", "amx_bf16", "avx2")
    assert cpu.cores >= 1


def test_memory(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n")
    assert machine.describe_memory(file) == machine.MemoryInfo(1_024_000, 614_400)


def test_without_proc(tmp_path):
    assert machine.describe_cpu(tmp_path / "none").flags == ()
    assert machine.describe_memory(tmp_path / "none").total > 0


def test_describe():
    found = machine.describe_machine()
    assert found.devices[0] == "cpu"
    assert found.packages["torch"]
    assert found.threads >= 1
