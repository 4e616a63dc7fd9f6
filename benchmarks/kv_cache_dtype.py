"""What pages in 8 and 4 bits cost: logits of the golden models, and facts found in long documents.

    python benchmarks/kv_cache_dtype.py [--device cuda] [--dtypes bfloat16] [--cases cairn-7m]
        [--contexts 4096,32768] [--formats auto,fp4_e2m1] [--output FILE]

Run it in the repository's root: the golden models lie under tests/data.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from cairn import LLM, SamplingParams
from cairn.bench.records import RecordFile
from cairn.config import default_model_path
from cairn.demo.document import build_document, make_facts
from cairn.specs.kv_format import KV_FORMATS

DATA = Path("tests/data")
TRAINED = "cairn-7m"
SEEDS = (1, 2, 3)
FACTS_OF_A_KIND = 4


def goldens(cases: list[str]) -> Iterator[tuple[str, Path, list[int], torch.Tensor]]:
    """(name, folder, prompt, reference logits of its last rows) of golden models; no cases: all."""
    for folder in sorted((DATA / "goldens" / "hils").iterdir()):
        if not folder.is_dir() or (cases and folder.name not in cases):
            continue
        vectors = load_file(folder / "vectors.safetensors")
        longest = max(int(n.split(".")[0][1:]) for n in vectors if n.endswith("input_ids"))
        prompt = vectors[f"n{longest}.input_ids"].tolist()
        yield folder.name, folder, prompt, vectors[f"n{longest}.prefill_logits"]
    if not cases or TRAINED in cases:
        golden = load_file(DATA / "goldens" / TRAINED / "vectors.safetensors")
        yield TRAINED, default_model_path(), golden["input_ids"].tolist(), golden["logits_tail"]


def logprobs(llm: LLM, prompt: list[int], rows: int) -> np.ndarray:
    """Log-probabilities [rows - 1, V] that the engine gives before each of the last tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    [result] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    lines = [dict(entry) for entry in result.prompt_logprobs[len(prompt) - rows + 1 :]]
    return np.array([[line[i].logprob for i in sorted(line)] for line in lines])


def golden_records(options: dict[str, str], cases: list[str]) -> Iterator[dict[str, object]]:
    """One record a golden model."""
    for name, folder, prompt, logits in goldens(cases):
        llm = LLM(folder, kv_cache_memory="64MiB", **options)
        rows = min(len(logits), len(prompt))
        want = torch.log_softmax(logits[-rows:-1].double(), -1).numpy()
        got = logprobs(llm, prompt, rows)
        error = np.abs(got - want)
        yield {
            "measured": "logits",
            "case": name,
            "weights": "trained" if name == TRAINED else "random",
            "tokens": len(prompt),
            "rows": rows - 1,
            "kl_mean": round(float((np.exp(want) * (want - got)).sum(-1).mean()), 6),
            "error_median": round(float(np.median(error.max(-1))), 5),
            "error_max": round(float(error.max()), 5),
            "top1_agreement": round(float((got.argmax(-1) == want.argmax(-1)).mean()), 4),
        }
        llm.shutdown()


def needle_records(options: dict[str, str], contexts: list[int]) -> Iterator[dict[str, object]]:
    """One record a context length: how many hidden facts the embedded model finds."""
    llm = LLM(kv_cache_memory="512MiB", max_num_seqs=4, **options)
    for context in contexts:
        asked = right = 0
        for seed in SEEDS:
            rng = random.Random(seed * context)
            facts = make_facts(FACTS_OF_A_KIND, rng)
            text = build_document(context, facts, rng).text
            llm.generate(text, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            params = [SamplingParams(temperature=0, max_tokens=len(f.answer)) for f in facts]
            results = llm.generate([text + f.question for f in facts], params, use_tqdm=False)
            asked += len(facts)
            right += sum(r.outputs[0].text == f.answer for r, f in zip(results, facts, strict=True))
        yield {
            "measured": "needles",
            "case": default_model_path().name,
            "weights": "trained",
            "context": context,
            "asked": asked,
            "right": right,
        }
    llm.shutdown()


def main() -> None:
    """Measure both and append the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--formats", default=",".join(("auto", *KV_FORMATS)))
    parser.add_argument("--cases", default="")
    parser.add_argument("--contexts", default="4096,32768")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    command = " ".join(["python benchmarks/kv_cache_dtype.py", *sys.argv[1:]])
    records = RecordFile("kv-cache-dtype", command, given.output)
    contexts = [int(word) for word in given.contexts.split(",") if word]
    cases = [word for word in given.cases.split(",") if word]
    for dtype in given.dtypes.split(","):
        for kv in given.formats.split(","):
            options = {"device": given.device, "dtype": dtype, "kv_cache_dtype": kv}
            found = [golden_records(options, cases)]
            if dtype == "bfloat16":
                found.append(needle_records(options, contexts))
            for measured in found:
                for fields in measured:
                    records.add(options | fields)
                    sys.stdout.write(f"{dtype} {kv}: {fields}\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
