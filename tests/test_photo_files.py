"""Photos as people have them, and archives of them: damaged, hostile, or merely odd."""

import io
import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, SHARED_DATA
from photo_helpers import collection, contents, encoded, manifest_of, names_in, pets, picture, put, run, table  # noqa: F401
from PIL import Image

import prepare_data
from common.errors import UserError
from image_data import decode
from image_data.data_options import DataOptions
from image_data.decode import decode_image
from image_data.sources import load_images
from preparation import archives, photo_files
from preparation.image_folder import split_photos
from preparation.layouts import recognise
from preparation.prepare_options import parse_prepare_options

# Files as people have them


def oriented():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(1, (30, 20)), "JPEG", exif=exif)


def bomb():
    """20,000 x 20,000 pixels in a file of some kilobytes."""
    return encoded(Image.new("1", (20_000, 20_000)), "PNG")


def animation(kind):
    frames = [picture(seed) for seed in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def palette_with_transparency():
    image = picture(3).convert("P")
    return encoded(image, "PNG", transparency=bytes(range(256)))


GOOD = {
    "cmyk.jpg": encoded(picture(0, mode="CMYK"), "JPEG"),
    "sixteen bits.png": encoded(Image.fromarray(np.arange(120, dtype=np.uint16).reshape(10, 12) * 500)),
    "palette.png": palette_with_transparency(),
    "rotated.jpg": oriented(),
    "animated.gif": animation("GIF"),
    "animated.webp": animation("WEBP"),
    "one pixel.png": encoded(picture(0, (1, 1))),
    "wide.png": encoded(picture(0, (20_000, 30), "L")),
    "png named.jpg": encoded(picture(5)),
    'it\'s "quoted" $HOME; rm -rf *.png': encoded(picture(6)),
    "émoji 🐈‍⬛ 猫.png": encoded(picture(7)),
    "new\nline\ttab.png": encoded(picture(8)),
    b"not utf-8 \xff\xfe.png": encoded(picture(9)),
    "x" * 240 + ".png": encoded(picture(10)),
    "-rf.png": encoded(picture(11)),
    "UPPER.JPG": encoded(picture(12), "JPEG"),
}


BAD = {
    "truncated.jpg": (encoded(picture(0, (200, 200)), "JPEG")[:3000], "truncated"),
    "empty.png": (b"", "the file is empty"),
    "text.jpg": (b"this is a note, not a photo\n", "not an image of a known format"),
    "bomb.png": (bomb(), "decompression bomb"),
    "phone.heic": (b"\0\0\0\x18ftypheic" + bytes(100), "not an image of a known format"),
}


@pytest.fixture
def attic(tmp_path):
    """What is in people's folders."""
    root = tmp_path / "attic"
    for label in ("one", "zwei drei"):
        for name, data in GOOD.items():
            folder = os.fsencode(root / label)
            os.makedirs(folder, exist_ok=True)
            Path(os.fsdecode(os.path.join(folder, os.fsencode(name)))).write_bytes(data)
    for name, (data, _) in BAD.items():
        put(root / "one" / name, data)
    (root / "one/again").symlink_to(root)
    (root / "one/circle.png").symlink_to("circle.png")
    (root / "one/broken.png").symlink_to("nowhere.png")
    (root / "one/linked.png").symlink_to(root / "one/palette.png")
    os.mkfifo(root / "one/pipe.png")
    put(root / "one/Thumbs.db", b"?")
    put(root / "__MACOSX/one/._cmyk.jpg", b"?")
    return root


REASONS = {
    **{f"one/{name}": reason for name, (_, reason) in BAD.items()},
    "one/circle.png": "Too many levels of symbolic links",
    "one/broken.png": "No such file or directory",
    "one/pipe.png": "not a regular file",
}


@pytest.mark.parametrize("flags", [["--resolution=16"], []], ids=["resized", "as they are"])
def test_files_as_people_have_them(attic, run, tmp_path, flags, caplog):
    out = tmp_path / "out"
    run(attic, out, *flags, "--eval_fraction=0.5")
    left_out = manifest_of(out)["left_out"]
    assert set(left_out) == set(REASONS)
    for name, reason in REASONS.items():
        assert reason in left_out[name]
    sources = [image["source"] for image in manifest_of(out)["images"]]
    assert len(sources) == len(set(sources)) == 2 * len(GOOD) + 1
    assert "one/new\nline\ttab.png" in sources
    for name in names_in(out):
        assert name.isascii()
        assert name.isprintable()
        assert len(name) < 150
    for split in ("train", "test"):
        source = load_images(DataOptions(train_data_dir=str(out), cache_dir=str(tmp_path / "cache")), split)
        assert len(source) == len(table(out / split))
        for row in range(len(source)):
            decode_image(source.read(row), 3, 16, True)
    file = {image["source"]: out / image["file"] for image in manifest_of(out)["images"]}
    turned = Image.open(file["one/rotated.jpg"])
    assert turned.width < turned.height
    first = np.asarray(Image.open(file["one/animated.gif"]).convert("RGB"))
    size = min(Image.fromarray(first).size)
    np.testing.assert_array_equal(first.transpose(2, 0, 1), decode_image(GOOD["animated.gif"], 3, size, False))


def test_unreadable_permissions(pets, run, tmp_path, monkeypatch):
    """As root no permission is missing, so that the system's answer is simulated."""

    def open_file(path, *arguments, **options):
        if Path(path).name == "03.jpeg":
            raise PermissionError(13, "Permission denied")
        return open(path, *arguments, **options)

    def scandir(path):
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied")
        return os_scandir(path)

    os_scandir = os.scandir
    monkeypatch.setattr(decode, "open", open_file, raising=False)
    monkeypatch.setattr(photo_files.os, "scandir", scandir)
    run(pets, tmp_path / "out", "--resolution=8")
    assert manifest_of(tmp_path / "out")["left_out"] == {"dog": "Permission denied", "03.jpeg": "Permission denied"}


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_real_permissions(pets, run, tmp_path):
    (pets / "cat/03.jpeg").chmod(0)
    (pets / "dog").chmod(0)
    run(pets, tmp_path / "out", "--resolution=8")
    (pets / "dog").chmod(stat.S_IRWXU)
    assert manifest_of(tmp_path / "out")["left_out"] == {"dog": "Permission denied", "03.jpeg": "Permission denied"}


def test_nothing_to_prepare(run, tmp_path):
    for name, data, message in (
        ("empty", None, "there is no image that can be used"),
        ("bad", b"", "one.png .the file is"),
    ):
        (tmp_path / name).mkdir()
        if data is not None:
            put(tmp_path / name / "one.png", data)
        with pytest.raises(UserError, match=message):
            run(tmp_path / name, tmp_path / f"{name} out")


# Archives


def zip_of(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(
                name if isinstance(name, zipfile.ZipInfo) else zipfile.ZipInfo(name, (2020, 1, 2, 3, 4, 6)), data
            )
    return path


def tar_of(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as file:
        for name, data in members.items():
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data or b"")
            file.addfile(info, io.BytesIO(data or b""))
    return path


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


MEMBERS = {f"raw-img/{name}/{n}.png": encoded(picture(n)) for name in ("cane", "gatto") for n in range(10)}


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.xz"])
def test_archives(run, tmp_path, kind, capsys, monkeypatch):
    archive = tmp_path / f"animals.{kind}"
    mode = {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz"}.get(kind)
    members = {**MEMBERS, "translate.py": b"print()", "raw-img/cane/._1.png": b"?", "__MACOSX/x.png": b"?"}
    members["raw-img/cane/__a name of two underlines.png"] = MEMBERS["raw-img/cane/0.png"]
    zip_of(archive, members) if kind == "zip" else tar_of(archive, members, mode)
    for name, data in members.items():
        put(tmp_path / "folder" / name, data)
    run(archive, tmp_path / "out", "--resolution=8")
    run(tmp_path / "folder", tmp_path / "from folder", "--resolution=8")
    of_archive, of_folder = (
        {name: data for name, data in contents(tmp_path / name).items() if name != "prepared.json"}
        for name in ("out", "from folder")
    )
    assert of_archive == of_folder
    assert not list((tmp_path / "out").glob(".unpacked*"))

    capsys.readouterr()
    monkeypatch.setattr(archives, "_unpack_whole", None)  # not a second time
    run(archive, tmp_path / "out", "--resolution=8")
    assert "nothing to do, 21 images are there" in capsys.readouterr().out
    monkeypatch.undo()

    next((tmp_path / "out/train").rglob("*.png")).unlink()
    run(archive, tmp_path / "out", "--resolution=8")
    assert "1 images written, 20 already there" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../evil.png", "/tmp/evil.png", "a/../../evil.png", "C:\\evil.png", "..\\evil.png"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_no_path_leaves_the_folder(run, tmp_path, name, kind):
    if kind == "tar" and "\\" in name:
        name = name.replace("\\", "/")
    members = {**MEMBERS, name: encoded(picture(0))}
    archive = (zip_of if kind == "zip" else tar_of)(tmp_path / f"a.{kind}", members)
    with pytest.raises(UserError, match="refused, because .* in it leads out of the folder"):
        run(archive, tmp_path / "deep/er/out")
    assert not list(tmp_path.rglob("evil*"))
    assert not list((tmp_path / "deep/er/out").glob(".unpacked*"))


def test_links_and_devices_stay_in_the_archive(run, tmp_path, caplog):
    png = encoded(picture(0))
    archive = tar_of(
        tmp_path / "a.tar.gz",
        {
            **MEMBERS,
            special("raw-img/cane/link.png", tarfile.SYMTYPE, "/etc/passwd"): None,
            special("raw-img/cane/hard.png", tarfile.LNKTYPE, "raw-img/cane/1.png"): None,
            special("raw-img/cane/device.png", tarfile.CHRTYPE): None,
            special("raw-img/cane/pipe.png", tarfile.FIFOTYPE): None,
            special("escape", tarfile.SYMTYPE, str(tmp_path)): None,
            "escape/evil.png": png,
            "raw-img/cane/1.png/below.png": png,
        },
    )
    before = set(tmp_path.iterdir())
    run(archive, tmp_path / "out", "--resolution=8", "--eval_fraction=0")
    assert set(tmp_path.iterdir()) == before | {tmp_path / "out"}
    sources = [image["source"] for image in manifest_of(tmp_path / "out")["images"]]
    assert len(sources) == 21  # the twenty, and one in an honest folder called escape

    link = zipfile.ZipInfo("raw-img/cane/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive = zip_of(tmp_path / "b.zip", {**MEMBERS, link: png})
    run(archive, tmp_path / "out2", "--resolution=8", "--eval_fraction=0")
    assert len(manifest_of(tmp_path / "out2")["images"]) == 20


def test_archives_that_are_too_much(run, tmp_path, monkeypatch):
    archive = zip_of(tmp_path / "a.zip", {**MEMBERS, "raw-img/cane/zeros.png": bytes(3 * 2**20)})
    monkeypatch.setattr(archives, "LARGEST_FILE", 2**20)
    run(archive, tmp_path / "out", "--resolution=8")
    assert len(manifest_of(tmp_path / "out")["images"]) == 20
    monkeypatch.setattr(archives, "DISK_LEFT_FREE", 2**60)
    with pytest.raises(UserError, match="no room to unpack it"):
        run(archive, tmp_path / "out2")
    assert not list((tmp_path / "out2").glob(".unpacked*"))


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_damaged_archives(run, tmp_path, kind):
    archive = tmp_path / f"a.{kind}"
    zip_of(archive, MEMBERS) if kind == "zip" else tar_of(archive, MEMBERS, "w" if kind == "tar" else "w:gz")
    data = archive.read_bytes()
    damages = [data[: len(data) // 2], data[:200] + bytes(300) + data[500:], b"no archive"]
    for number, damage in enumerate(damages):
        archive.write_bytes(damage)
        with pytest.raises(UserError, match="a.(zip|tar|tar.gz): (the archive is damaged|is neither a folder nor)"):
            run(archive, tmp_path / f"out{number}")
        assert not list((tmp_path / f"out{number}").glob(".unpacked*"))


def test_an_encrypted_archive_is_named(run, tmp_path, caplog):
    archive = zip_of(tmp_path / "a.zip", MEMBERS)
    data = bytearray(archive.read_bytes())
    at = data.find(b"PK\x01\x02")
    data[at + 8] |= 1
    archive.write_bytes(data)
    run(archive, tmp_path / "out", "--resolution=8")
    assert len(manifest_of(tmp_path / "out")["images"]) == 19


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the photos"),
        (["nowhere", "--output=x"], "nowhere: there is no such folder or archive"),
        (["."], "--output_dir: name the folder to make, or use --check"),
        ([".", "--output=x", "--resolution=0"], "--resolution 0: must be from 1 to 16384"),
        ([".", "--output=x", "--eval_fraction=1"], "--eval_fraction 1.0: must be at least 0 and below 1"),
        ([".", "--output=x", "--captions=a photo"], "--captions 'a photo': must say where the class goes"),
        ([".", "--output=x", "--center_crop"], "--center_crop needs --resolution"),
        ([".", "--output=x", "--sysu_folders"], "--sysu_folders needs --resolution"),
        ([".", "--output_dri=x"], "unknown flag --output_dri; did you mean --output_dir"),
        ([".", "--output=x", "--num_workers=-1"], "--num_workers -1: must be from 0 to 1024"),
    ],
)
def test_mistakes(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *arguments])
    with pytest.raises(UserError) as caught:
        prepare_data.main()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_source_may_follow_check():
    for arguments in (["--check", "photos"], ["photos", "--check"], ["--source=photos", "--check=true"]):
        options = parse_prepare_options([*arguments, "--resolution=8"])
        assert (options.source, options.check, options.resolution) == ("photos", True, 8)


def test_help_and_mistakes_need_no_torch():
    code = "import sys, runpy; sys.argv = ['prepare_data.py', 'nowhere']; "
    code += "\ntry: runpy.run_path('prepare_data.py', run_name='__main__')\nexcept SystemExit as end: print(end.code)"
    code += "\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"], done.stderr


# The real collections


@pytest.mark.skipif(not SHARED_DATA.exists(), reason=f"there are no photos in {SHARED_DATA}")
@pytest.mark.parametrize(
    ("name", "layout", "train", "test"),
    [
        ("sysu-shape-dataset", "SYSU-Shape", 1387, 154),
        ("animals10", "Animals-10", 2700, 300),
        ("dtd", "DTD", 1080, 120),
    ],
)
def test_the_real_collections(name, layout, train, test, run, tmp_path):
    found = recognise(SHARED_DATA / name)
    assert (found.layout, found.left_out) == (layout, {})
    splits = split_photos(found.photos, 0.1, "test", 0)
    assert (len(splits["train"]), len(splits["test"])) == (train, test)
    few = {*sorted({photo.label for photo in found.photos})[:2]}
    run(SHARED_DATA / name, tmp_path / "out", "--resolution=32", "--classes", *few)
    source = load_images(DataOptions(train_data_dir=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache")))
    assert len(source) == sum(photo.label in few for photo in splits["train"])
