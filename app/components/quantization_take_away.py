"""What makes a variant again elsewhere: the command for its checkpoint, the config that runs it, and the Run form with it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from app.components import links, notes, quantization_save, settings_text, widgets
from app.services import Services
from app.state import fill_form
from backend.config import EngineConfig
from backend.errors import ServeLabError
from backend.experiments.quantization_checkpoints import NUM_WINDOWS, WINDOW_LENGTH, why_not_saved
from backend.experiments.quantization_config import REFERENCE, Variant, parse_variant, variant_name
from backend.experiments.quantization_results import wholes
from backend.workload.spec import Workload
from db.run_rows import Run

_VARIANT = "quantization-taken"

_EXPLANATION = r"""
Weights in fewer bits take less memory and less time to read, at some loss. A method lays a **grid** over the weights, with a
scale for each group, row or matrix, and stores the nearest value's code:

$$w \approx s\,(q - z), \qquad q = \mathrm{clamp}\!\left(\mathrm{round}(w / s) + z,\; 0,\; 2^b - 1\right)$$

**int8, int4** round to nearest; **gptq** goes through the columns of a layer and moves what rounding one of them costs into
those that follow, by the Hessian $H = X^T X$ of its inputs, so that $\lVert XW^T - XQ^T\rVert^2$ is small (Frantar et al.,
*GPTQ*, 2022); **awq** scales up the columns whose inputs are large before it rounds, and the inputs down by as much (Lin et
al., *AWQ*, 2023). **nf4** has the quantiles of a normal distribution for a grid, as weights are distributed so (Dettmers et
al., *QLoRA*, 2023). **w8a8_int8** and **fp8** round activations too, so that the products themselves are in 8 bits;
**llm_int8** leaves out the few inputs with values beyond a threshold, as they would spoil everyone's scale (Dettmers et al.,
*LLM.int8()*, 2022): these are the outlier channels.

**KV** variants leave the weights as they are, and keep keys and values in 8 or 4 bits, with a scale for each token and head.

What it costs is measured on a text: perplexity, and the divergence of next-token distributions from the unquantized model's,

$$\mathrm{PPL} = \exp\!\Big(\!-\tfrac1n \sum_i \ln p(t_i)\Big), \qquad
\mathrm{KL} = \tfrac1n \sum_i \sum_v p_\mathrm{ref}(v)\,\ln \frac{p_\mathrm{ref}(v)}{p(v)}$$

KL tells variants apart long before perplexity does: where some tokens gain what others lose, perplexity stays, KL does not.
"""


def show(services: Services, run: Run, results: Sequence[Any]) -> None:
    rows = {row["variant"]: row for row in wholes(results) if row["variant"] != REFERENCE and not row["problem"]}
    if not rows:
        st.info("No variant of this run has been made.", icon=":material/ios_share:")
        return
    if st.session_state.get(_VARIANT) not in rows:
        st.session_state[_VARIANT] = next(iter(rows))
    chosen = st.selectbox("Variant", list(rows), format_func=variant_name, key=_VARIANT, width=420)
    taken = chosen or next(iter(rows))
    try:
        variant = parse_variant(taken)
        config = variant.engine_config(variant.checkpoint or rows[taken]["checkpoint"] or run.model)
    except ServeLabError as error:
        st.error(notes.plain(str(error)), icon=":material/error:")
        return
    st.markdown("**A model of its own**, in the compressed-tensors format")
    quantization_save.show(services, run, taken, variant)
    if command := model_command(run.model, variant, run.config.get("calibration")):
        st.markdown("**On the command line**")
        st.code(command, language="bash")
    st.markdown("**The config that runs it**")
    st.code(settings_text.toml_document(_differences(config)), language="toml")
    st.code(settings_text.cli_command(config, Workload()), language="bash")
    if st.button("Open on the Run page", icon=":material/play_arrow:", key="quantization-open"):
        widgets.fill(fill_form(config, Workload(), variant.name))
        st.switch_page(links.RUN, query_params={})  # without, it refuses to leave the name of the view behind


def explanation() -> None:
    """What the page shows, closed until somebody asks."""
    with st.expander("What am I looking at?", icon=":material/help:"):
        st.markdown(_EXPLANATION)


def model_command(model: str, variant: Variant, calibration: str | None = None) -> str | None:
    """The command line that makes the variant's checkpoint, or a model of one in a folder; None where there is none.

    Args:
        calibration: the file of its text; None: the one that ships.
    """
    if variant.checkpoint is not None:
        is_folder = "/" in variant.checkpoint
        return f"servelab models add {shlex.quote(variant.checkpoint)}" if is_folder else None
    if why_not_saved(variant):
        return None
    settings = variant.quantization
    parts = [f"servelab quantize {shlex.quote(model)} --method {variant.method}"]
    options = {
        "--bits": settings.bits,
        "--group-size": settings.group_size,
        "--zero-point": settings.zero_point,
        "--granularity": settings.granularity,
        "--head": settings.head,
    }
    parts += [f"{name} {value}" for name, value in options.items() if value is not None]
    parts += [f"--skip {shlex.quote(pattern)}" for pattern in settings.skip]
    if variant.is_calibrated:
        parts.append(f"--windows {NUM_WINDOWS} --window-length {WINDOW_LENGTH}")
        parts += [f"--calibration {shlex.quote(calibration)}"] if calibration else []
    parts.append(f"-o {shlex.quote(f'{Path(model).name}-{variant.method}'.replace(':', '-'))}")
    return " ".join(parts)


def _differences(config: EngineConfig) -> dict[str, Any]:
    """Tables with what is not the default, and the model."""
    default, actual = EngineConfig().to_dict(), config.to_dict()
    changed = {
        table: {key: value for key, value in values.items() if value != default[table][key]}
        for table, values in actual.items()
        if isinstance(values, dict)
    }
    return {table: values for table, values in (changed | {"model": {"name": config.model.name}}).items() if values}
