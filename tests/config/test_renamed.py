"""Files that an older version wrote are read by the keys of today."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import yaml
from made_receipts import receipt_of
from plan_files import plan_of, write

from bigdit.config.plan_file import read_plan_file
from bigdit.receipt import Receipt
from bigdit.report.run import read_run


def test_a_receipt_of_images_a_second_is_one_of_samples() -> None:
    receipt = receipt_of(samples_per_second=12.5)
    document = receipt.model_dump(mode="json")
    document["images_per_second"] = document.pop("samples_per_second")
    assert Receipt.model_validate_json(json.dumps(document)) == receipt


def test_a_plan_of_images_a_second_is_read_with_its_own_digest(tmp_path: Path) -> None:
    file = write(plan_of(), tmp_path / "plan") / "plan.yaml"
    document = yaml.safe_load(file.read_text())
    expected = document["expected"]
    expected["images_per_second_per_card"] = expected.pop("samples_per_second_per_card")
    del document["digest"]
    said = json.dumps(document, sort_keys=True, default=str)
    file.write_text(yaml.safe_dump(document | {"digest": hashlib.sha256(said.encode()).hexdigest()[:16]}))
    assert read_plan_file(file) == plan_of()


def test_rows_of_images_a_second_numbered_from_0_are_drawn_as_samples_from_1(tmp_path: Path) -> None:
    rows = [{"step": 0, "images_per_second": 2.0}, {"step": 1, "samples_per_second": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read_run(tmp_path).series("samples_per_second") == [(1, 2.0), (2, 3.0)]
    assert read_run(tmp_path).steps == 2
