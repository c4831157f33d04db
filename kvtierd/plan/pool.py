"""How the host's DRAM budget becomes ranks, sizes, hugepages; and what must stay for the host.

The operator states what the HOST gives (MemCache's dram.size is per rank, the classic mistake). Sizes are
aligned downward, since upward would take memory nobody granted; the plan says what was left over.
"""

from __future__ import annotations

from kvtierd.mmc_conf.sizes import MAX_SIZE_BYTES, alignment_bytes
from kvtierd.plan.hardware import facts_of, needs_hugepages
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import HugepagePlan, PoolPlan, Series
from kvtierd.plan.remarks import Remarks
from kvtierd.quantities import GIB, MIB, align_down, format_size
from kvtierd.settings import PoolSettings

MIN_WORLD_SIZE = 16
SHARED_MEMORY_PROTOCOL = "host_shm"  # without hugepages the pool's memory is in /dev/shm


def plan_pool(
    pool: PoolSettings,
    series: Series,
    *,
    engine_ranks: int,
    nodes: int,
    remarks: Remarks,
    spare_ranks: int = 0,
    growth: int = 0,
) -> PoolPlan:
    """Ranks and sizes of this node's part of the pool.

    Args:
        pool: the settings.
        series: the hardware series, already decided.
        engine_ranks: MemCache ranks that the engines of this node open.
        spare_ranks: further ones that they would open if all of them used the pool: there is room for them in the
            world, which must be of one size on all hosts, whatever their roles, and cannot change at run time.
        nodes: nodes in the cluster.
        growth: pool holders that may be added later on each node ([policy] grow_holders).
        remarks: where notes and refusals go.
    """
    facts = facts_of(series)
    protocol = facts.protocol if pool.protocol == "auto" else pool.protocol
    if protocol not in facts.protocols:
        remarks.refuse(
            "pool.protocol",
            f"protocol {protocol} does not work on series {series}",
            f'write protocol = "auto" or one of: {", ".join(facts.protocols)}',
        )
    placement = facts.placement if pool.placement == "auto" else pool.placement
    step = alignment_bytes(protocol, a3=series == "A3")
    providers = pool.holders if placement == "standalone" else engine_ranks
    if providers == 0:
        remarks.refuse(
            "pool.no-provider",
            "nobody would hold the pool: there is no engine rank on this node",
            'add an [[engine]] with devices, or write [pool] placement = "standalone"',
        )
        providers = 1
    dram = align_down(pool.dram // providers, step)
    if dram == 0:
        remarks.refuse(
            "pool.too-small",
            f"{format_size(pool.dram)} over {_ranks(providers)} is less than one alignment unit"
            f" of {format_size(step)} each",
            f'give at least dram = "{format_size(step * providers).replace(" ", "")}"',
        )
    if dram > MAX_SIZE_BYTES:
        remarks.refuse(
            "pool.rank-too-big",
            f"{format_size(dram)} for one rank is more than MemCache takes ({format_size(MAX_SIZE_BYTES)})",
            f"raise [pool] holders to {-(-pool.dram // MAX_SIZE_BYTES)}",
        )
    capacity = dram * providers
    if dram and capacity != pool.dram:
        remarks.note(
            "pool.aligned-down",
            f"{format_size(pool.dram)} over {_ranks(providers)} is aligned down to {format_size(dram)} each"
            f" ({protocol} needs multiples of {format_size(step)}): the pool has {format_size(capacity)},"
            f" {format_size(pool.dram - capacity)} stay unused",
        )
    clients = engine_ranks if placement == "standalone" else 0
    world_size = _world_size(
        pool, providers + clients, spare_ranks, growth if placement == "standalone" else 0, nodes, remarks
    )
    return PoolPlan(
        placement=placement,
        protocol=protocol,
        budget_bytes=pool.dram,
        capacity_bytes=capacity,
        providers=providers,
        clients=clients,
        dram_bytes_per_provider=dram,
        alignment_bytes=step,
        world_size=world_size,
    )


def all_bytes(pool: PoolPlan) -> int:
    """What the pool takes of this host, added holders included."""
    return pool.capacity_bytes + pool.added_bytes


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _world_size(
    pool: PoolSettings, ranks: int, spare_ranks: int, growth: int, nodes: int, remarks: Remarks
) -> int:
    needed = ranks * nodes
    if pool.world_size is not None:
        if pool.world_size < needed:
            remarks.refuse(
                "pool.world-size",
                f"world_size {pool.world_size} is below the {needed} ranks of this plan",
                f"write world_size = {needed} or more, or leave it out",
            )
        return pool.world_size
    # A change needs a MetaService restart, so leave room: twice the ranks and whatever may be added, a power of two. The
    # same on every host as long as the hosts are alike.
    room = max(2 * (ranks + spare_ranks), ranks + spare_ranks + growth) * nodes
    return max(MIN_WORLD_SIZE, 1 << (room - 1).bit_length())


def plan_hugepages(
    pool: PoolSettings, series: Series, planned: PoolPlan, inventory: Inventory, remarks: Remarks
) -> HugepagePlan:
    """Pages to reserve for this node's part of the pool, head-room included."""
    available = {p.page_size_bytes for p in inventory.hugepages}
    size = pool.hugepage_size or inventory.default_hugepage_size_bytes or 2 * MIB
    needed = needs_hugepages(series, planned.protocol)
    if pool.hugepages == "off":
        if needed:
            remarks.refuse(
                "hugepages.needed",
                f"{planned.protocol} on {series} needs hugepages for the pool, but hugepages are off",
                'write [pool] hugepages = "auto"',
            )
        return HugepagePlan(page_size_bytes=size)
    if pool.hugepages == "auto" and not needed:
        return HugepagePlan(page_size_bytes=size)
    if size not in available:
        have = ", ".join(format_size(s) for s in sorted(available)) or "none"
        remarks.refuse(
            "hugepages.size",
            f"this kernel has no hugepages of {format_size(size)} (it has: {have})",
            "choose another hugepage_size" if available else "boot a kernel with hugetlbfs",
        )
    if pool.hugepages == "auto":
        pages = -(-(all_bytes(planned) + pool.headroom) // size)
    else:
        pages = pool.hugepages
        if pages * size < all_bytes(planned):
            remarks.refuse(
                "hugepages.too-few",
                f"{pages} pages of {format_size(size)} are {format_size(pages * size)},"
                f" less than the pool's {format_size(all_bytes(planned))}",
                'write hugepages = "auto"',
            )
    return HugepagePlan(
        page_size_bytes=size,
        pages=pages,
        per_numa_node=_spread(pages, inventory) if pool.numa == "spread" else {},
    )


def _spread(pages: int, inventory: Inventory) -> dict[int, int]:
    """Evenly over the NUMA nodes that have memory; the first nodes take what does not divide."""
    nodes = [n.node for n in inventory.numa_nodes if n.memory_total_bytes != 0]
    if not nodes:
        return {}
    share, rest = divmod(pages, len(nodes))
    return {node: share + (1 if position < rest else 0) for position, node in enumerate(nodes)}


def check_memory(
    pool: PoolSettings,
    planned: PoolPlan,
    hugepages: HugepagePlan,
    inventory: Inventory,
    remarks: Remarks,
    *,
    owned_pages: int = 0,
) -> None:
    """Refuses a plan that would starve the host, or whose pool does not fit where it is to be.

    Two limits: of all memory, ``max(16 GiB, 10 %)`` must not be bound by pool and hugepages; of the memory
    that is available now, the pages still to be reserved must leave as much. ``owned_pages`` of the plan's size
    are kvtierd's own from an earlier start: they are not somebody else's even when they are in use.
    """
    shm = inventory.shm_total_bytes
    in_shm = planned.protocol == SHARED_MEMORY_PROTOCOL and not hugepages.pages
    if in_shm and shm is not None and shm < all_bytes(planned):
        # Else the kernel kills the first process that writes beyond what fits, long after the start.
        remarks.refuse(
            "memory.shm",
            f"the pool's {format_size(all_bytes(planned))} do not fit into /dev/shm, which has {format_size(shm)}",
            f"mount -o remount,size={all_bytes(planned)} /dev/shm; in a container: docker run --shm-size",
        )
    total = inventory.memory_total_bytes
    reserve = pool.host_reserve if pool.host_reserve is not None else max(16 * GIB, total // 10)
    named = "[pool] host_reserve" if pool.host_reserve is not None else "max(16 GiB, 10 % of memory)"
    already = sum(p.total_pages * p.page_size_bytes for p in inventory.hugepages)
    planned_pages = hugepages.pages * hugepages.page_size_bytes
    same = next((p for p in inventory.hugepages if p.page_size_bytes == hugepages.page_size_bytes), None)
    reusable = 0  # pages that are there and not in the use of others
    if planned_pages and same is not None:
        others = max(0, same.total_pages - same.free_pages - owned_pages)
        reusable = (same.total_pages - others) * same.page_size_bytes
    bound = already + (max(0, planned_pages - reusable) if planned_pages else all_bytes(planned))
    left = total - bound
    advice = (
        f'lower [pool] dram, or state what this host can spare: host_reserve = "{max(1, left // GIB)}GiB"'
        if left >= GIB
        else "lower [pool] dram"
    )
    if left < reserve:
        remarks.refuse(
            "memory.host-starves",
            f"pool and hugepages would take {format_size(bound)} of {format_size(total)} and leave the host"
            f" {format_size(max(left, 0))}, less than {format_size(reserve)} ({named})",
            advice,
        )
        return
    new_pages = max(0, planned_pages - reusable)
    left_now = inventory.memory_available_bytes - new_pages
    if new_pages and left_now < min(reserve, total // 2):
        remarks.refuse(
            "memory.busy-now",
            f"of {format_size(inventory.memory_available_bytes)} available now, {format_size(new_pages)} of new"
            f" hugepages would leave {format_size(max(left_now, 0))}, less than {format_size(reserve)} ({named})",
            "end what uses the memory, or lower [pool] dram",
        )
