"""Which cells may be measured: every variant in them proven where they run, and claiming what they ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.spec import Cell
from registry import Catalogue, Ledger, device_class, enumerate_static, load_recipe
from registry.static import StaticCatalogue


@dataclass
class Judge:
    """Reads the ledger once a variant; a plug-in's variants are in no ledger."""

    catalogue: Catalogue
    ledger: Ledger
    unproven_too: bool = False
    static: StaticCatalogue = field(default_factory=enumerate_static)
    _known: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def unproven(self, cell: Cell) -> str:
        """Empty when every variant of the cell is proven on its device and dtype, else the first gap in words."""
        for key in self._variants(cell):
            where = (key, cell.device, cell.dtype)
            if where not in self._known:
                self._known[where] = self._gap(*where)
            if self._known[where]:
                return self._known[where]
        return ""

    def refusal(self, cell: Cell) -> str:
        """Why the cell is not started: empty, ``unproven: ...`` or what the variant does not claim."""
        unproven = self.unproven(cell)
        if unproven and not self.unproven_too:
            return f"unproven: {unproven}"
        return self._unclaimed(cell)

    def _variants(self, cell: Cell) -> list[str]:
        keys = (
            [f"{cell.operator}/{cell.variant}"] if f"{cell.operator}/{cell.variant}" in self.catalogue.variants else []
        )
        if cell.recipe is not None:
            keys += [
                f"{operator}/{variant}" for operator, variant in load_recipe(cell.recipe, self.static).variants.items()
            ]
        return keys

    def _gap(self, key: str, device: str, dtype: str) -> str:
        if key not in self.static.variants:
            return f"{key} is a plug-in's"
        gaps = self.ledger.gaps(self.static.variants[key], device_class(device), dtype, self.static)
        more = f" and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        return f"{key}, {gaps[0]}{more}" if gaps else ""

    def _unclaimed(self, cell: Cell) -> str:
        if cell.kind not in ("operator", "fetch"):
            return ""
        variant = self.catalogue.variant(f"{cell.operator}/{cell.variant}")
        if cell.mode == "forward_backward" and not variant.grad:
            return f"not claimed: {variant.key} has no backward pass"
        if cell.device.partition(":")[0] not in variant.devices or cell.dtype not in variant.dtypes:
            return f"not claimed: {variant.key} runs on {', '.join(variant.devices)} in {', '.join(variant.dtypes)}"
        for letter, (low, high, multiple) in variant.shapes.items():
            size = cell.axes.get(letter, low)
            if not low <= size <= high or size % multiple:
                return (
                    f"not claimed: {variant.key} takes {letter} from {low} to {high} in steps of {multiple}, not {size}"
                )
        return ""
