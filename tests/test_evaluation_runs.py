"""evaluate.py on the checkpoints of a run."""

import json
import re
from pathlib import Path

import pytest
from evaluation_helpers import evaluate, metrics_in, network, read_csv, run  # noqa: F401

from common.errors import UserError

SAMPLED = ("--num_images=12", "--ddim", "--num_inference_steps=2", "--batch_size=6")


@pytest.fixture(scope="module")
def measured_run(run, evaluate) -> Path:
    evaluate(f"--run_dir={run}", *SAMPLED)
    return run


class TestRun:
    def test_every_checkpoint_has_a_row(self, measured_run):
        rows = read_csv(measured_run / "evaluation_results.csv")
        assert [row["step"] for row in rows] == ["2", "4"]
        for row in rows:
            assert (row["weights"], row["sampler"], row["steps"], row["num_images"]) == ("ema", "ddim", "2", "12")
            assert row["settings"] == "skip_schedule=linear eta=0.0"
            assert row["reference"] == "digits[train], 1797 images of 8x8, cropped at the centre"
            assert float(row["train_seconds"]) > 0
            assert len(metrics_in(row)) == 7
        assert rows[0]["sha256"] != rows[1]["sha256"]

    def test_tensorboard_and_card_have_them_too(self, measured_run):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (folder,) = (measured_run / "logs" / "evaluation").iterdir()
        assert folder.name.startswith("ema-ddim-2-skip_schedule=linear-eta=0.0-digits-train-1797-images")
        events = EventAccumulator(str(folder)).Reload()
        assert [event.step for event in events.Scalars("fd_tiny_vision@12")] == [2, 4]
        card = (measured_run / "README.md").read_text()
        assert card.count("## Evaluation") == 1
        assert "| `fd_tiny_vision@12` (few images) |" in card
        assert "![FD](FD_vs_TrainingSteps.png)" in card
        assert card.index("## Metrics") < card.index("## Evaluation") < card.index("## Repeat this run")

    def test_done_work_is_skipped(self, measured_run, evaluate, monkeypatch, capsys):
        from evaluation.samples import Samples

        before = (measured_run / "evaluation_results.csv").read_bytes()
        monkeypatch.setattr(Samples, "generate", None)
        evaluate(f"--run_dir={measured_run}", *SAMPLED)
        assert not (measured_run / ".unmeasured").exists()
        assert capsys.readouterr().err.count("has been measured already") == 2
        assert (measured_run / "evaluation_results.csv").read_bytes() == before

    def test_two_runs_are_not_one_table(self, measured_run, evaluate, tmp_path):
        import shutil

        other = shutil.copytree(measured_run, tmp_path / "other")
        evaluate(f"--run_dir={measured_run}", *SAMPLED, "--checkpoints=4", f"--output_dir={tmp_path / 'results'}")
        table = tmp_path / "results" / "evaluation_results.csv"
        (row,) = read_csv(table)
        before = table.read_text().replace(row["sha256"], "0" * 64)
        table.write_text(before)  # as if of another run
        with pytest.raises(UserError, match="its evaluation_results.csv is of another run; name another folder"):
            evaluate(f"--run_dir={measured_run}", *SAMPLED, f"--output_dir={tmp_path / 'results'}")
        assert table.read_text() == before
        with pytest.raises(UserError, match=f"--output_dir {other}: is another run, whose table and card are its own"):
            evaluate(f"--run_dir={measured_run}", *SAMPLED, f"--output_dir={other}")

    def test_all_images_that_are_left_decide_about_compiling(self, measured_run, evaluate, tmp_path, monkeypatch):
        from evaluation.features import FeatureExtractor

        compiled = []
        monkeypatch.setattr(FeatureExtractor, "_compile", lambda *given: compiled.append(given))
        for number, times in ((25, 0), (24, 1)):
            monkeypatch.setattr("evaluation.features.WORTH_COMPILING", number)
            evaluate(f"--run_dir={measured_run}", *SAMPLED, f"--output_dir={tmp_path / str(number)}")
            assert len(compiled) == times

    @pytest.mark.parametrize("ending", ["signal", "kill", "while measuring"])
    def test_to_be_stopped_loses_a_batch(self, measured_run, evaluate, tmp_path, monkeypatch, capsys, ending):
        from common.interruption import Interrupted
        from evaluation.features import FeatureExtractor
        from generation import engine, sample_folder

        generate, extract = sample_folder.generate, FeatureExtractor.extract
        made = []

        def stopped_at_step_4(batches, *given):
            for job, seeds, images in generate(batches, *given):
                yield job, seeds, images
                made.append(len(seeds))
                if job.model.step == 4 and ending == "signal":
                    monkeypatch.setattr(engine, "stop_requested", lambda: "SIGTERM")
                elif job.model.step == 4 and ending == "kill":
                    raise MemoryError

        def stopped_when_generated(extractor, batches, count, name, *given, **named):
            if name == "checkpoint-4" and ending == "while measuring":
                raise Interrupted("SIGTERM", "stopped; start the same command again to continue")
            return extract(extractor, batches, count, name, *given, **named)

        monkeypatch.setattr(sample_folder, "generate", stopped_at_step_4)
        monkeypatch.setattr(FeatureExtractor, "extract", stopped_when_generated)
        with pytest.raises(MemoryError if ending == "kill" else Interrupted) as stopped:
            evaluate(f"--run_dir={measured_run}", *SAMPLED, f"--output_dir={tmp_path}")
        if ending != "kill":
            told = r"SIGTERM: stopped at checkpoint-4 \(its images so far are kept\); earlier results are in .* again"
            assert re.match(told, str(stopped.value))
        assert [row["step"] for row in read_csv(tmp_path / "evaluation_results.csv")] == ["2"]
        (folder,) = (tmp_path / ".unmeasured").iterdir()
        assert f"Its images are in {folder} until they are measured" in capsys.readouterr().err
        images = {path: path.read_bytes() for path in folder.rglob("0*.png")}
        before = 12 if ending == "while measuring" else 6
        assert len(images) == before

        monkeypatch.undo()
        monkeypatch.setattr(sample_folder, "generate", lambda batches, *given: (
            made.extend(len(seeds) for _, seeds in batches) or generate(batches, *given)
        ))  # fmt: skip
        made.clear()
        evaluate(f"--run_dir={measured_run}", *SAMPLED, f"--output_dir={tmp_path}")
        assert sum(made) == 12 - before
        assert not (tmp_path / ".unmeasured").exists()
        found, expected = (read_csv(path / "evaluation_results.csv") for path in (tmp_path, measured_run))
        for one, other in zip(found, expected, strict=True):
            assert metrics_in(one) == pytest.approx(metrics_in(other), rel=1e-9, abs=1e-9)

    @pytest.mark.parametrize("what", ["samples", "reference"])
    def test_a_pass_that_is_killed_goes_on_where_it_was(self, measured_run, evaluate, tmp_path, monkeypatch, what):
        from evaluation import features
        from evaluation.networks import FeatureNetwork

        compute, seen = FeatureNetwork.compute, []
        flags = [f"--run_dir={measured_run}", *SAMPLED, "--checkpoints=4", "--feature_batch_size=4"]
        cache = f"--cache_dir={tmp_path / 'cache'}" if what == "reference" else "--feature_batch_size=4"
        evaluate(*flags, f"--output_dir={tmp_path / 'whole'}")

        def killed(point: str) -> None:
            if point == "features" and len(seen) >= 2:
                raise MemoryError

        def counted(network, images, *given):
            seen.append(len(images))
            return compute(network, images, *given)

        monkeypatch.setattr(features, "SECONDS_BETWEEN_SAVES", 0.0)
        monkeypatch.setattr(features, "fault_point", killed)
        monkeypatch.setattr(features.FeatureExtractor, "_seconds_per_batch", lambda *given: 1.0)
        monkeypatch.setattr(FeatureNetwork, "compute", counted)
        with pytest.raises(MemoryError):
            evaluate(*flags, cache, f"--output_dir={tmp_path / 'killed'}")
        assert len(seen) == 2
        monkeypatch.setattr(features, "fault_point", lambda point: None)
        seen.clear()
        evaluate(*flags, cache, f"--output_dir={tmp_path / 'killed'}")
        assert sum(seen) == 4 if what == "samples" else 1797 + 12 - 8 <= sum(seen) <= 1797 + 12 - 8 + 3
        (found,), (expected,) = (read_csv(tmp_path / name / "evaluation_results.csv") for name in ("killed", "whole"))
        assert metrics_in(found) == metrics_in(expected)
        assert not [*tmp_path.rglob("unfinished/*")]

    def test_three_sets_of_images_have_a_mean_and_a_spread(self, run, evaluate, tmp_path, monkeypatch, capsys):
        """The first set is that of a plain call, the others follow on; an interruption costs a set."""
        import statistics

        from evaluation.samples import Samples
        from evaluation.session import Session

        few, flags = "--checkpoints=4", [f"--run_dir={run}", *SAMPLED]
        evaluate(*flags, few, f"--output_dir={tmp_path}")
        report, generate, sets = Session._report, Samples.generate, []

        def killed(session, *given):
            report(session, *given)
            if len(sets) == 1:
                raise MemoryError

        def noted(samples, output_dir):
            sets.append(samples.seeds)
            return generate(samples, output_dir)

        monkeypatch.setattr(Samples, "generate", noted)
        monkeypatch.setattr(Session, "_report", killed)
        with pytest.raises(MemoryError):
            evaluate(*flags, few, "--repeats=3", f"--output_dir={tmp_path}")
        monkeypatch.setattr(Session, "_report", report)
        capsys.readouterr()
        evaluate(*flags, few, "--repeats=3", f"--output_dir={tmp_path}")
        assert sets == [range(12, 24), range(24, 36)]
        rows = {row["settings"].partition("eta=0.0")[2]: row for row in read_csv(tmp_path / "evaluation_results.csv")}
        assert sorted(rows) == ["", " repeats=3", " seeds=12-23", " seeds=24-35"]
        mean = metrics_in(rows.pop(" repeats=3"))
        for column in ("fd_tiny_vision@12", "kd_tiny_vision@12", "precision_tiny_vision@12"):
            values = [float(row[column]) for row in rows.values()]
            assert mean[column] == pytest.approx(statistics.fmean(values))
            assert mean[column.replace("@", "_std@")] == pytest.approx(statistics.stdev(values))
        assert len({row["fd_tiny_vision@12"] for row in rows.values()}) == 3
        shown = capsys.readouterr().out
        spread = f"{mean['fd_tiny_vision@12']:.5g} +- {mean['fd_tiny_vision_std@12']:.2g}"
        assert spread in shown.split("train_seconds")[1]
        assert "fd_tiny_vision@12\u2020" in shown
        assert "of fewer than 10,000 images" in shown
        # Nothing is left to do, and nothing is said twice.
        before = (tmp_path / "evaluation_results.csv").read_bytes()
        evaluate(*flags, few, "--repeats=3", f"--output_dir={tmp_path}")
        assert len(sets) == 2
        assert (tmp_path / "evaluation_results.csv").read_bytes() == before
        assert "repeats=3" not in capsys.readouterr().out

    def test_two_splits_are_measured_with_the_images_of_one(self, run, evaluate, tmp_path, monkeypatch, capsys):
        import numpy as np
        from PIL import Image

        from evaluation.features import FeatureExtractor
        from evaluation.samples import Samples

        generator = np.random.default_rng(0)
        for split, count in (("train", 30), ("test", 20)):
            (tmp_path / "photos" / split).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256 if split == "train" else 100, (8, 8), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / split / f"{number}.png")
        generate, extract, generated, passes = Samples.generate, FeatureExtractor.extract, [], []
        monkeypatch.setattr(Samples, "generate", lambda *given: generated.append(0) or generate(*given))

        def noted(extractor, batches, count, name, *given, **named):
            passes.append(name)
            return extract(extractor, batches, count, name, *given, **named)

        monkeypatch.setattr(FeatureExtractor, "extract", noted)
        flags = [f"--run_dir={run}", *SAMPLED, "--checkpoints=4", f"--train_data_dir={tmp_path / 'photos'}"]
        evaluate(*flags, "--split", "train", "test", f"--output_dir={tmp_path / 'both'}")
        assert len(generated) == 1
        assert passes.count("checkpoint-4") == 1
        both = read_csv(tmp_path / "both" / "evaluation_results.csv")
        names = [row["reference"].partition(",")[0] for row in both]
        assert [name.partition("[")[2] for name in names] == ["train]", "test]"]
        table = capsys.readouterr().out.split("train_seconds")[1]
        assert all(name in table for name in ("reference", *names))
        for split, row in zip(("train", "test"), both, strict=True):
            evaluate(*flags, f"--split={split}", f"--output_dir={tmp_path / split}")
            (alone,) = read_csv(tmp_path / split / "evaluation_results.csv")
            assert metrics_in(row) == pytest.approx(metrics_in(alone), rel=1e-9, abs=1e-9)
        assert both[0]["fd_tiny_vision@12"] != both[1]["fd_tiny_vision@12"]
        # One that is missing is measured with the images of both, and then there is nothing left to do.
        generated.clear()
        evaluate(*flags, "--split", "train", "test", f"--output_dir={tmp_path / 'train'}")
        evaluate(*flags, "--split", "train", "test", f"--output_dir={tmp_path / 'train'}")
        assert len(generated) == 1
        assert len(read_csv(tmp_path / "train" / "evaluation_results.csv")) == 2

    def test_kept_images_of_several_sets_are_in_one_folder(self, run, evaluate, tmp_path):
        import shutil

        copy = tmp_path / "run"
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("evaluation*", "best*"))
        flags = [f"--run_dir={copy}", *SAMPLED, "--checkpoints=4", "--repeats=2"]
        evaluate(*flags, f"--output_dir={tmp_path / 'other'}")
        evaluate(*flags, "--keep_images")
        (folder,) = (copy / "generated").iterdir()
        assert len([*folder.rglob("0*.png")]) == 24
        found, expected = (read_csv(path / "evaluation_results.csv") for path in (copy, tmp_path / "other"))
        assert [metrics_in(row) for row in found] == [pytest.approx(metrics_in(row)) for row in expected]
        # They are found there by whoever wants all of them or a set.
        (copy / "evaluation_results.csv").unlink()
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("0*.png")}
        evaluate(*flags)
        assert [metrics_in(row) for row in read_csv(copy / "evaluation_results.csv")] == [
            pytest.approx(metrics_in(row)) for row in expected
        ]
        assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("0*.png")}

    def test_each_set_is_measured_with_its_own_images(self, run, evaluate, tmp_path):
        """The folder may lack a set that was measured without keeping it, or hold other images in between."""
        import shutil

        copy, flags = tmp_path / "run", [*SAMPLED, "--checkpoints=4"]
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("evaluation*", "best*"))
        evaluate(f"--run_dir={run}", *flags, "--repeats=3", f"--output_dir={tmp_path / 'expected'}")
        evaluate(f"--run_dir={copy}", *flags)
        evaluate(f"--run_dir={copy}", *flags, "--repeats=3", "--keep_images")
        (folder,) = (copy / "generated").iterdir()
        assert json.loads((folder / "samples.json").read_text())["seeds"] == "12-35"
        found, expected = (
            [metrics_in(row) for row in read_csv(path / "evaluation_results.csv")]
            for path in (copy, tmp_path / "expected")
        )
        assert found == list(map(pytest.approx, expected))

    def test_results_are_on_the_disk_before_the_screen(self, measured_run, evaluate, tmp_path, monkeypatch):
        def closed(text, **given):
            raise BrokenPipeError

        monkeypatch.setattr("evaluation.session.print", closed, raising=False)
        with pytest.raises(BrokenPipeError):
            evaluate(f"--run_dir={measured_run}", *SAMPLED, "--checkpoints=2", f"--output_dir={tmp_path}")
        assert [row["step"] for row in read_csv(tmp_path / "evaluation_results.csv")] == ["2"]
        with pytest.raises(BrokenPipeError):  # the table of all rows comes last
            evaluate(f"--run_dir={measured_run}", *SAMPLED, "--checkpoints=2", f"--output_dir={tmp_path}")
        assert (tmp_path / "FD_vs_TrainingSteps.png").exists()

    def test_what_the_disk_does_not_take_is_on_the_screen(self, measured_run, evaluate, tmp_path, monkeypatch, capsys):
        def full(*given):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("evaluation.results.write_atomically", full)
        with pytest.raises(
            UserError, match=f"{tmp_path}: the results cannot be written there .No space left on device"
        ):
            evaluate(f"--run_dir={measured_run}", *SAMPLED, "--checkpoints=2", f"--output_dir={tmp_path}")
        assert "fd_tiny_vision@12" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (b"\xff\xfe", "evaluation_results.csv cannot be read: move it away .'utf-8' codec"),
            (b"step,fid\n1,2\n", "is not a table of this program .no column train_seconds.: move it away"),
            ("folder", "evaluation_results.csv cannot be read: move it away .Is a directory"),
            ("cut", "evaluation_results.csv cannot be read: move it away .line 3 does not have"),
            ("words", "evaluation_results.csv cannot be read: move it away .could not convert string to float"),
            ("best", "best_scores.csv is a folder where a table must go: move it away"),
        ],
    )
    def test_a_damaged_table_is_found_before_the_work(
        self, measured_run, evaluate, tmp_path, damage, message, monkeypatch
    ):
        monkeypatch.setattr("evaluation.networks.load_networks", lambda *given: pytest.fail("the work has begun"))
        table = tmp_path / "evaluation_results.csv"
        whole = (measured_run / "evaluation_results.csv").read_bytes()
        if damage in ("folder", "best"):
            (table if damage == "folder" else tmp_path / "best_scores.csv").mkdir()
        else:
            cut = whole[: whole.rindex(b",")]
            words = cut + b",many\n"
            table.write_bytes({"cut": cut, "words": words}.get(damage, damage))
        with pytest.raises(UserError, match=message):
            evaluate(f"--run_dir={measured_run}", *SAMPLED, f"--output_dir={tmp_path}")

    def test_rows_of_pruned_checkpoints_stay(self, measured_run, evaluate, tmp_path):
        import shutil

        copy = tmp_path / "run"
        shutil.copytree(measured_run, copy)
        shutil.rmtree(copy / "checkpoint-2")
        evaluate(f"--run_dir={copy}", "--num_images=10", "--ddim", "--num_inference_steps=1", "--batch_size=10")
        rows = read_csv(copy / "evaluation_results.csv")
        assert [(row["step"], row["num_images"]) for row in rows] == [("2", "12"), ("4", "10"), ("4", "12")]
        assert rows[0]["fd_tiny_vision@12"]
        assert not rows[0]["fd_tiny_vision@10"]

    def test_a_pipeline_without_checkpoints_is_of_the_step_that_it_names(self, measured_run, tmp_path):
        import shutil

        from evaluation.samples import models_of
        from run_folder.folder import RunFolder

        copy = tmp_path / "run"
        shutil.copytree(measured_run, copy)
        for checkpoint in copy.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        run = RunFolder(copy)
        step = run.pipeline_step()
        with run.metrics_file.open("a") as file:  # it went on, and was killed before it wrote another
            file.write(json.dumps(run.read_metrics()[-1] | {"step": step + 50, "train_seconds": 1e6}) + "\n")
        (model,) = models_of(run, [], None)
        assert model.step == step
        assert model.train_seconds < 1e6
        lines = run.metrics_file.read_text().splitlines()
        run.metrics_file.write_text("\n".join(line for line in lines if f'"step": {step},' not in line) + "\n")
        assert step not in [line["step"] for line in run.read_metrics()]
        (model,) = models_of(run, [], None)
        assert model.step == step

    def test_kept_images_are_used_and_give_the_same_numbers(self, measured_run, evaluate, tmp_path, monkeypatch):
        import shutil

        from evaluation.samples import Samples

        copy = tmp_path / "run"
        shutil.copytree(measured_run, copy)
        (copy / "evaluation_results.csv").unlink()
        evaluate(f"--run_dir={copy}", *SAMPLED, "--keep_images", "--checkpoints", "4")
        expected = read_csv(measured_run / "evaluation_results.csv")[1]
        (found,) = read_csv(copy / "evaluation_results.csv")
        assert metrics_in(found) == pytest.approx(metrics_in(expected), rel=1e-9, abs=1e-9)

        # The folder is that of generate.py: measured by itself, it says what it holds.
        (folder,) = (copy / "generated").iterdir()
        evaluate(f"--generated={folder}", "--dataset_name=digits", f"--output_dir={tmp_path / 'images'}")
        (row,) = read_csv(tmp_path / "images" / "evaluation_results.csv")
        assert (row["step"], row["sampler"], row["steps"]) == ("4", "ddim", "2")
        (copy / "evaluation_results.csv").unlink()
        monkeypatch.setattr(Samples, "generate", None)
        evaluate(f"--run_dir={copy}", *SAMPLED, "--checkpoints", "4")
        assert metrics_in(read_csv(copy / "evaluation_results.csv")[0]) == metrics_in(found)

        # Not if some are gone.
        removed = folder / "images" / "000003.png"
        data = removed.read_bytes()
        removed.unlink()
        (copy / "evaluation_results.csv").unlink()
        with pytest.raises(UserError, match="holds 11 images, but 12 according to its samples.json"):
            evaluate(f"--run_dir={copy}", *SAMPLED, "--checkpoints", "4")
        removed.write_bytes(data)
        with pytest.raises(UserError, match="folder must be moved away first: .*batch_size 6 -> 4"):
            evaluate(
                f"--run_dir={copy}",
                *SAMPLED,
                "--checkpoints",
                "4",
                "--keep_images",
                "--batch_size=4",
                "--num_images=13",
            )

        # Not those of other weights.
        record = (folder / "samples.json").read_text()
        (folder / "samples.json").write_text(record.replace(found["sha256"], "0" * 64))
        with pytest.raises(TypeError, match="NoneType"):  # they are to be generated
            evaluate(f"--run_dir={copy}", *SAMPLED, "--checkpoints", "4")

    def test_a_pipeline_without_checkpoints_is_the_end_of_the_run(self, measured_run, tmp_path):
        import shutil

        from evaluation.samples import models_of
        from run_folder.folder import RunFolder

        copy = tmp_path / "run"
        shutil.copytree(measured_run, copy, ignore=shutil.ignore_patterns("checkpoint-*"))
        (model,) = models_of(RunFolder(copy), [], None)
        rows = read_csv(measured_run / "evaluation_results.csv")
        assert (str(model.step), model.sha256) == (rows[1]["step"], rows[1]["sha256"])

    def test_what_is_no_run_is_refused(self, evaluate, tmp_path):
        with pytest.raises(UserError, match="there is no run .no config.yaml."):
            evaluate(f"--run_dir={tmp_path}")
