"""IO managers: steps exchange handles of change sets and extract versions, never rows.

The step itself stores the data, under the extract's lease. The IO managers check that it exists, record its location, and
find it again for the next step, in any process. The asset's metadata names the extract; without it, the second to last part
of the asset key does. No postponed annotations here: Dagster reads the fields' types.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.errors import ExtractError, TirError
from tir_dagster.orchestration.metadata import EXTRACT
from tir_dagster.refresh.state.change_sets import MANIFEST, ChangeSetStore
from tir_dagster.refresh.state.hold import HoldFile
from tir_dagster.refresh.state.mirror import mount
from tir_dagster.refresh.state.versions import Version, VersionStore

CHANGE_SET_IO, HYPER_IO = "change_set_io_manager", "hyper_io_manager"


class StateFolder(dg.ConfigurableResource):
    """The folder of change sets, extract versions and leases; with an address, a copy of what that object store holds."""

    path: str
    # Such as s3://bucket/prefix, for workers that share no disk.
    address: str | None = None

    @property
    def folder(self) -> Path:
        if self.address:
            mount(Path(self.path), self.address)
        return Path(self.path)

    def change_sets(self, extract: str) -> ChangeSetStore:
        return ChangeSetStore(self.folder / "extracts" / extract / "change_sets")

    def versions(self, extract: str) -> VersionStore:
        return VersionStore(self.folder / "extracts" / extract / "versions")

    def hold(self, extract: str) -> HoldFile:
        return HoldFile(self.folder / "extracts" / extract)


@dataclass(frozen=True)
class StagedChangeSet:
    """A pending change set and the folder with its keys and rows."""

    change_set: ChangeSet
    folder: Path


class ChangeSetIOManager(dg.ConfigurableIOManager):
    """Passes the handle of a change set; an input gets it with its folder while it is pending.

    An asset that takes one partition of `changed_keys` gets a StagedChangeSet; one that takes several gets a mapping of
    those that are still pending, by partition.
    """

    state: dg.ResourceDependency[StateFolder]

    def handle_output(self, context: dg.OutputContext, obj: ChangeSet) -> None:
        context.add_output_metadata(staged_metadata(self.state.change_sets(extract_of(context)), obj))

    def load_input(self, context: dg.InputContext) -> StagedChangeSet | Mapping[str, StagedChangeSet]:
        extract = extract_of(context)
        store = self.state.change_sets(extract)
        pending = {
            change_set.id: StagedChangeSet(change_set, store.path(change_set.id)) for change_set in store.pending()
        }
        partitions = list(context.asset_partition_keys)
        if len(partitions) != 1:
            return {name: pending[name] for name in partitions if name in pending}
        if partitions[0] not in pending:
            raise TirError(
                f"{extract}: the change set {partitions[0]} is not pending: a publish settled it, or it was never staged. "
                "Its rows are in the extract: use purged_extract, or a newer change set."
            )
        return pending[partitions[0]]


class HyperIOManager(dg.ConfigurableIOManager):
    """Passes the handle of a verified extract version; it contains all slices, whichever partitions a run names.

    An asset that takes `purged_extract` gets the newest verified Version; its `.extract` is the Hyper file. Open a
    copy: Hyper writes into a file that it only reads.
    """

    state: dg.ResourceDependency[StateFolder]

    def handle_output(self, context: dg.OutputContext, obj: Version) -> None:
        version = self.state.versions(extract_of(context)).get(obj.id)
        if version.folder != obj.folder:
            raise ExtractError(
                f"The version {obj.id} is in {obj.folder}, but the IO manager looks in {version.folder}. "
                "Give the resource `state` and the IO managers the same path."
            )
        context.add_output_metadata(_file_metadata(version.extract, version.extract.stat().st_size))

    def load_input(self, context: dg.InputContext) -> Version:
        extract = extract_of(context)
        store = self.state.versions(extract)
        newest = store.latest()
        if newest is None:
            raise ExtractError(
                f"{extract}: there is no verified extract in {store.folder}. Materialize purged_extract first, "
                f"or run tir refresh {extract}."
            )
        return newest


def extract_of(context: dg.OutputContext | dg.InputContext) -> str:
    output = context.upstream_output if isinstance(context, dg.InputContext) else context
    name = (output.definition_metadata or {}).get(EXTRACT) if output is not None else None
    if name is not None:
        return str(getattr(name, "value", name))
    if len(context.asset_key.path) > 1:
        return context.asset_key.path[-2]
    raise TirError(
        f"{context.asset_key.to_user_string()} is not an asset of an extract. Use this IO manager for changed_keys and "
        "purged_extract, and for assets that take them."
    )


def staged_metadata(store: ChangeSetStore, change_set: ChangeSet) -> dict[str, dg.MetadataValue]:
    """Return path and size of a staged change set; raise if it does not exist."""
    folder = store.path(change_set.id)
    if not (folder / MANIFEST).is_file():
        raise TirError(
            f"{change_set.extract}: the change set {change_set.id} is not in {folder}. Nothing was purged; refresh again."
        )
    return _file_metadata(folder, sum(_sizes(folder)))


def _file_metadata(path: Path, size: int) -> dict[str, dg.MetadataValue]:
    return {
        "path": dg.MetadataValue.path(str(path)),
        "dagster/uri": dg.MetadataValue.text(path.absolute().as_uri()),
        "tir/bytes": dg.MetadataValue.int(size),
    }


def _sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
