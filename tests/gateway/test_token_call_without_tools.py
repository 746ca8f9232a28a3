"""A model that takes no tools serves requests without any, and says what to do to the others."""

from __future__ import annotations

from pathlib import Path

from gateway_rig import ASK, TOOLS, Rig, said
from render_families import write_renderer

from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_only_requests_with_tools_are_refused(tmp_path: Path) -> None:
    renderer = template_renderer(read_folder(write_renderer(tmp_path, TEMPLATE)))
    async with Rig(renderer, [said("Done.")]) as rig:
        status, answer = await rig.post({"model": "m", "messages": ASK, "tools": TOOLS})
        assert status == 400
        assert (
            "the request offers tools: this model takes none: its chat template" in answer["error"]["message"]
        )
        assert "use an agent without tools" in answer["error"]["message"]
        status, answer = await rig.post({"model": "m", "messages": ASK, "tools": []})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Done.")
        await rig.sealed()
