"""The catalogue of devices, and devices of one's own: every figure sourced, every mistake named."""

from __future__ import annotations

import dataclasses
import tomllib
from importlib import resources
from pathlib import Path

import pytest
import torch

from memfit.cost.devices import EXAMPLE, Device, device, devices, load_device
from memfit.errors import BadOption

NAMES = (
    *("titan-x", "titan-xp", "gtx-1080ti", "rtx-2080ti", "rtx-3090", "rtx-4090", "t4", "l4"),
    *("v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb"),
)
NEEDED = {"memory": "24GiB", "flops": "35e12", "bandwidth": "900GB/s", "link": "25GB/s"}


def fields(**changes: str | None) -> str:
    """The four that are needed, with changes; None leaves one out."""
    return ",".join(f"{key}={value}" for key, value in (NEEDED | changes).items() if value is not None)


def test_the_catalogue_has_these_devices() -> None:
    assert tuple(d.name for d in devices()) == NAMES
    assert all(device(d.name) is d and d.title for d in devices())


def test_titan_x_is_the_card_of_the_vdnn_paper() -> None:
    card = device("titan-x")
    assert card.memory_bytes == 12 * 2**30
    assert card.flops_per_s == 7e12
    assert card.bandwidth_bytes_per_s == 336e9
    assert card.send_bytes_per_s == card.fetch_bytes_per_s == 12.8e9
    assert card.convolution_efficiency == 0.75
    assert card.plain_convolution_efficiency == 3 / 7
    assert card.launch_s == 5e-6
    assert card.stream_bytes_per_s == pytest.approx(0.8 * 336e9)


@pytest.mark.parametrize("name", ["defaults", *NAMES])
def test_every_figure_in_the_file_stands_beside_its_source(name: str) -> None:
    text = resources.files("memfit.cost").joinpath("devices.toml").read_text()
    for key, entry in tomllib.loads(text)[name].items():
        if key != "title":
            assert set(entry) == {"value", "source"}, key
            assert entry["source"].startswith(("NVIDIA", "vDNN", "assumed: ")), key


@pytest.mark.parametrize("card", devices(), ids=lambda card: card.name)
def test_catalogue_figures_are_plausible(card: Device) -> None:
    assert set(card.sources) == set(card.figures())
    assert 11 * 2**30 <= card.memory_bytes <= 80 * 2**30 and card.memory_bytes % 2**30 == 0
    assert 0 < card.fp64_flops_per_s < card.flops_per_s <= card.fp16_flops_per_s
    assert card.flops_per_s <= card.bf16_flops_per_s <= card.fp16_flops_per_s
    assert card.tf32_flops_per_s is None or card.tf32_flops_per_s <= card.fp16_flops_per_s
    assert card.send_bytes_per_s < card.bandwidth_bytes_per_s < card.flops_per_s
    assert card.plain_convolution_efficiency < card.convolution_efficiency


def test_the_peak_goes_by_the_type_of_the_operands() -> None:
    card = device("v100-16gb")
    assert card.peak_flops_per_s(torch.float32) == 15.7e12
    assert card.peak_flops_per_s(torch.float16) == 125e12
    assert card.peak_flops_per_s(torch.bfloat16) == 15.7e12  # Volta has no units for it
    assert card.peak_flops_per_s(torch.float64) == 7.8e12
    assert device("a100-40gb").peak_flops_per_s(torch.float32) == 19.5e12  # not TF32's 156e12


def test_devices_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        device("t4").memory_bytes = 1  # type: ignore[misc]


# ---- One's own.


def test_four_fields_make_a_device() -> None:
    card = load_device("memory=24GB,flops=35e12,bandwidth=900GB/s,link=25GB/s")
    assert card.memory_bytes == 24 * 10**9
    assert card.flops_per_s == card.fp16_flops_per_s == card.bf16_flops_per_s == 35e12
    assert card.fp64_flops_per_s == 35e12 / 32
    assert card.tf32_flops_per_s is None
    assert card.bandwidth_bytes_per_s == 900e9
    assert card.send_bytes_per_s == card.fetch_bytes_per_s == 25e9
    assert (card.latency_s, card.launch_s) == (10e-6, 5e-6)
    assert card.convolution_efficiency == device("titan-x").convolution_efficiency
    assert card.name == "custom"
    assert card.sources["flops"] == "given by the user" and card.sources["fp64"].startswith("assumed")


def test_fields_know_units() -> None:
    card = load_device(
        "name=mine, memory=24GiB, flops=35TFLOPS, fp16=0.3PFLOPS, bandwidth=1TB/s, link=25GiB/s, link_fetch=20 GB/s, "
        "launch=4us, latency=0.02ms, memory_efficiency=90%"
    )
    assert card.name == "mine"
    assert card.memory_bytes == 24 * 2**30
    assert card.flops_per_s == 35e12
    assert card.fp16_flops_per_s == card.bf16_flops_per_s == 0.3e15
    assert card.bandwidth_bytes_per_s == 1e12
    assert card.send_bytes_per_s == 25 * 2**30
    assert card.fetch_bytes_per_s == 20e9
    assert card.launch_s == pytest.approx(4e-6) and card.latency_s == pytest.approx(20e-6)
    assert card.memory_efficiency == pytest.approx(0.9)


def test_a_small_file_makes_a_device(tmp_path: Path) -> None:
    file = tmp_path / "mycard.toml"
    file.write_text(
        'memory = "24GiB"\nflops = 35e12\nbandwidth = { value = 900e9, source = "its sheet" }\nlink = "25GB/s"\n'
    )
    card = device(str(file))
    assert card == load_device(file)
    assert card.name == "mycard" and card.file == str(file)
    assert card.memory_bytes == 24 * 2**30 and card.bandwidth_bytes_per_s == 900e9
    assert card.sources["bandwidth"] == "its sheet"


@pytest.mark.parametrize("card", devices(), ids=lambda card: card.name)
def test_devices_survive_the_way_through_a_file_and_through_fields(card: Device, tmp_path: Path) -> None:
    file = tmp_path / "copy.toml"
    file.write_text(card.to_toml())
    copy = load_device(file)
    assert copy == card
    assert copy.sources == card.sources and copy.title == card.title
    assert device(card.to_fields()) == card


def test_the_example_in_the_messages_works() -> None:
    assert device(EXAMPLE).memory_bytes == 24 * 2**30


# ---- Mistakes.


def test_an_unknown_name_lists_those_known_and_guesses() -> None:
    with pytest.raises(BadOption) as caught:
        device("titanx")
    text = str(caught.value)
    assert "no device 'titanx'" in text and "Did you mean 'titan-x'?" in text
    assert all(name in text for name in NAMES)
    assert "./mycard.toml" in text and EXAMPLE in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (fields(bandwidth=None), "device 'custom': bandwidth missing. A device needs memory, flops, bandwidth, link"),
        (fields(memory=None, link=None), "memory and link missing"),
        (fields(bandwith="1"), "unknown key 'bandwith'. Did you mean 'bandwidth'?"),
        (fields(colour="red"), "unknown key 'colour'. Known keys: name, title, memory"),
        (fields(memory="lots"), "memory='lots' is not a size in bytes such as '24GiB'"),
        (fields(memory="24GHz"), "memory='24GHz' is not a size"),
        (fields(memory="1.2.3GB"), "memory='1.2.3GB' is not a size"),
        (fields(memory="0.5"), "memory='0.5' is less than a byte"),
        (fields(bandwidth="900GB"), "bandwidth='900GB' is not bytes per second such as '900GB/s'"),
        (fields(link="100Gb/s"), "link='100Gb/s' is not bytes per second"),  # bits, eight times fewer
        (fields(flops="35T"), "flops='35T' is not flops per second such as 35e12 or '35TFLOPS'"),
        (fields(flops="-1e12"), "flops='-1e12' must be above 0"),
        (fields(link="0"), "link='0' must be above 0"),
        (fields(flops="1e999"), "flops='1e999' must be above 0"),
        (fields(launch="0us"), "launch='0us' must be above 0"),
        (fields(matmul_efficiency="1.5"), "matmul_efficiency='1.5' must be above 0 and at most 1"),
        (fields() + ",flops=1e12", "'flops' is given twice"),
        (fields() + ",flops", "'flops' is not key=value"),
        (fields() + ",", "'' is not key=value"),
        ("memory=", "'memory=' is not key=value"),
    ],
)
def test_wrong_fields_are_named(text: str, message: str) -> None:
    with pytest.raises(BadOption) as caught:
        device(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memory = true", "memory=True is not a size"),
        ("memory = [1]", "memory=[1] is not a size"),
        ("memory = nan", "memory=nan must be above 0"),
        ("memory = { source = 'x' }", "memory must be a value, or { value = ..., source = '...' }"),
        ("memory = { value = 1, source = 2 }", "memory must be a value, or"),
        ("name = 3\nmemory = 1", "name=3 must be a string"),
        ("memory = ", "not TOML"),
    ],
)
def test_wrong_files_are_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(f'{line}\nflops = 35e12\nbandwidth = "900GB/s"\nlink = "25GB/s"\n')
    with pytest.raises(BadOption) as caught:
        load_device(file)
    assert message in str(caught.value) and "bad" in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"nowhere\.toml: there is no such file"):
        device("./nowhere.toml")
    with pytest.raises(BadOption, match="cannot be read"):
        load_device(tmp_path)
    with pytest.raises(BadOption, match="neither a TOML file nor fields such as"):
        load_device("mycard")
