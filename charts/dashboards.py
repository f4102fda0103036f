"""Writes the dashboards of the chart: `python -m charts.dashboards`, or `make dashboards`.

Each page answers three questions from top to bottom: is it well, what is slow, where? Gauges of the
exporter are taken as a maximum first, so that two exporters count nothing twice; counters of nodes are
summed over pods.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from charts.panels import BAD_IF_ZERO, GOOD_IF_ZERO, NEUTRAL, Page, Panel, Row, build
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER: Final = Path(__file__).parent / "rowlock" / "dashboards"

NS: Final = 'namespace=~"$namespace"'
POOL: Final = f'{NS}, pool=~"$pool"'
OF_POOLS: Final = "max by (namespace, pool, state)"
TRIED: Final = 'outcome=~"completed|failed|retried|timeout"'
FAILED: Final = 'outcome=~"failed|retried|timeout"'


def rate(metric: str, labels: str = POOL, *, by: str = "") -> str:
    """The summed rate of a counter over the dashboard's interval."""
    inner = f"rate({metric}{{{labels}}}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def hour(metric: str, labels: str = POOL, *, by: str = "") -> str:
    """What a counter has grown in the last hour."""
    inner = f"increase({metric}{{{labels}}}[1h])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(q: float, metric: str, labels: str = POOL, *, by: str = "") -> str:
    """A quantile of a histogram over the dashboard's interval."""
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', labels, by=f'le, {by}' if by else 'le')})"


def partitions(state: str) -> str:
    """How many partitions are in a state."""
    return f'sum({OF_POOLS} (rowlock_queue_partitions{{{POOL}, state="{state}"}}))'


LIVE_NODES: Final = Panel(
    title="Live nodes",
    text="Nodes with slots whose beats arrive.",
    queries=[
        (
            f'sum(max by (namespace, pool) (rowlock_nodes{{{POOL}, status="active"}}))',
            "active",
        )
    ],
    unit="short",
    kind="stat",
    width=3,
    levels=BAD_IF_ZERO,
)

QUEUES: Final = Page(
    uid="rowlock-queues",
    title="rowlock: queues",
    text="What waits, what runs, what fails, and how long it all takes.",
    pools=True,
    rows=[
        Row(
            question="Is it well?",
            panels=[
                Panel(
                    title="Queue size",
                    text="Partitions that could be claimed now, if a slot were free. Large is no fault"
                    " as long as it shrinks.",
                    queries=[(partitions("pending"), "waiting")],
                    unit="short",
                    kind="stat",
                    width=3,
                    levels=NEUTRAL,
                ),
                Panel(
                    title="Running",
                    text="Partitions that nodes hold: running, or claimed ahead for a slot that is"
                    " about to be free.",
                    queries=[(partitions("claimed"), "running")],
                    unit="short",
                    kind="stat",
                    width=3,
                    levels=NEUTRAL,
                ),
                Panel(
                    title="Oldest waiting",
                    text="How long the partition has waited that has waited longest, of those that"
                    " could be claimed now. In a large execution the last ones wait for all others.",
                    queries=[
                        (
                            f"max(rowlock_queue_oldest_pending_age_seconds{{{POOL}}})",
                            "oldest",
                        )
                    ],
                    unit="s",
                    kind="stat",
                    width=3,
                    levels=((None, "green"), (900, "orange"), (3600, "red")),
                    decimals=0,
                ),
                Panel(
                    title="Success rate, 1 h",
                    text="Attempts that completed, of all that ended by their own doing. Retried"
                    " ones count as failed here. Empty: nothing ended in the last hour.",
                    queries=[
                        (
                            hour("rowlock_partition_outcomes_total", f'{POOL}, outcome="completed"')
                            + " / ("
                            + hour("rowlock_partition_outcomes_total", f"{POOL}, {TRIED}")
                            + " > 0)",
                            "success",
                        )
                    ],
                    unit="percentunit",
                    kind="stat",
                    width=3,
                    levels=((None, "red"), (0.9, "orange"), (0.99, "green")),
                    most=1,
                    decimals=1,
                ),
                Panel(
                    title="Failed for good",
                    text="Partitions that in the last hour became FAILED after all their attempts, or were lost with their"
                    " node and may not be repeated.",
                    queries=[
                        (
                            hour("rowlock_partition_outcomes_total", f'{POOL}, outcome="failed"')
                            + " + "
                            + hour("rowlock_partitions_lost_total"),
                            "failed",
                        )
                    ],
                    unit="short",
                    kind="stat",
                    width=3,
                    levels=GOOD_IF_ZERO,
                    decimals=0,
                ),
                Panel(
                    title="Failed executions",
                    text="Executions that ended FAILED in the last 15 minutes. `rowlock executions"
                    " --status FAILED` lists them.",
                    queries=[
                        (
                            (
                                "sum(max by (namespace, pool, job_name) (rowlock_executions_ended"
                                f'{{{POOL}, status="failed"}})) or vector(0)'
                            ),
                            "failed",
                        )
                    ],
                    unit="short",
                    kind="stat",
                    width=3,
                    levels=GOOD_IF_ZERO,
                ),
                LIVE_NODES,
                Panel(
                    title="Database",
                    text="Whether the database answers everybody who asks it. While it does not, what"
                    " only it knows is missing here; nothing old is shown.",
                    queries=[(f"min(rowlock_database_up{{{NS}}})", "database")],
                    unit="none",
                    kind="stat",
                    width=3,
                    levels=BAD_IF_ZERO,
                    words={"0": "away", "1": "up"},
                ),
            ],
        ),
        Row(
            question="What is slow?",
            panels=[
                Panel(
                    title="Mean task time",
                    text="How long an attempt takes on average, by job.",
                    queries=[
                        (
                            rate("rowlock_partition_duration_seconds_sum", by="job_name")
                            + " / ("
                            + rate("rowlock_partition_duration_seconds_count", by="job_name")
                            + " > 0)",
                            "{{job_name}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    title="Task time, 95th percentile",
                    text="19 of 20 attempts are quicker than this, by job. Far above the mean: some"
                    " slices are much larger than the others.",
                    queries=[
                        (
                            quantile(0.95, "rowlock_partition_duration_seconds", by="job_name"),
                            "{{job_name}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    title="Wait for a claim",
                    text="From when a partition could be claimed until a node claimed it. It grows"
                    " with the queue; more slots make it shorter.",
                    queries=[
                        (quantile(q, "rowlock_partition_wait_seconds"), f"p{q * 100:g}")
                        for q in (0.5, 0.95, 0.99)
                    ],
                    unit="s",
                ),
                Panel(
                    title="Oldest waiting by pool",
                    text="A line that climbs for hours is a pool that is too small, or that nobody"
                    " serves.",
                    queries=[
                        (
                            (
                                "max by (namespace, pool)"
                                f" (rowlock_queue_oldest_pending_age_seconds{{{POOL}}})"
                            ),
                            "{{pool}}",
                        )
                    ],
                    unit="s",
                    width=12,
                ),
                Panel(
                    title="Slots in use",
                    text="Share of the slots that run something. Near 100 % with a long queue: more"
                    " nodes would help. Low with a long queue: look at limits (`rowlock explain`).",
                    queries=[
                        (
                            (
                                f'sum by (pool) (rowlock_slots{{{POOL}, state="used"}}) / (sum by (pool)'
                                f' (rowlock_slots{{{POOL}, state="total"}}) > 0)'
                            ),
                            "{{pool}}",
                        )
                    ],
                    unit="percentunit",
                    width=12,
                    most=1,
                ),
            ],
        ),
        Row(
            question="Where?",
            panels=[
                Panel(
                    title="Queue size by pool and state",
                    text="pending: could be claimed now. delayed: a retry that is not due. limited: its"
                    " execution runs as many as it may. suspended:"
                    " somebody stopped its execution. claimed: a node holds it.",
                    queries=[
                        (
                            f"{OF_POOLS} (rowlock_queue_partitions{{{POOL}}})",
                            "{{pool}} {{state}}",
                        )
                    ],
                    unit="short",
                    kind="stack",
                ),
                Panel(
                    title="Throughput by outcome",
                    text="Attempts that ended, each second, and how.",
                    queries=[
                        (rate("rowlock_partition_outcomes_total", by="outcome"), "{{outcome}}")
                    ],
                    unit="ops",
                    kind="stack",
                ),
                Panel(
                    title="Failure ratio by job",
                    text="Failed, retried and timed-out attempts, of all that ended by their own"
                    " doing.",
                    queries=[
                        (
                            rate(
                                "rowlock_partition_outcomes_total",
                                f"{POOL}, {FAILED}",
                                by="job_name",
                            )
                            + " / ("
                            + rate(
                                "rowlock_partition_outcomes_total",
                                f"{POOL}, {TRIED}",
                                by="job_name",
                            )
                            + " > 0)",
                            "{{job_name}}",
                        )
                    ],
                    unit="percentunit",
                    most=1,
                ),
                Panel(
                    title="Retries and time-outs by job",
                    text="Attempts that failed and are made again, and those that were killed for"
                    " their time-out.",
                    queries=[
                        (
                            rate(
                                "rowlock_partition_outcomes_total",
                                f'{POOL}, outcome=~"retried|timeout"',
                                by="job_name, outcome",
                            ),
                            "{{job_name}} {{outcome}}",
                        )
                    ],
                    unit="ops",
                ),
                Panel(
                    title="Rejected messages",
                    text="Payloads that broke their contract: a slice or plan of the wrong type, a"
                    " result that cannot be stored. Usually two versions of a job at once.",
                    queries=[(rate("rowlock_messages_rejected_total", by="reason"), "{{reason}}")],
                    unit="ops",
                ),
                Panel(
                    title="Executions by status",
                    text="Executions that have not ended. requested: nobody drives it yet.",
                    queries=[
                        (
                            (
                                "sum by (status) (max by (namespace, pool, status)"
                                f" (rowlock_executions{{{POOL}}}))"
                            ),
                            "{{status}}",
                        )
                    ],
                    unit="short",
                    kind="stack",
                ),
                Panel(
                    title="Jobs that fail most, 1 h",
                    text="The ten jobs with the most failed, retried or timed-out attempts.",
                    queries=[
                        (
                            "topk(10, "
                            + hour(
                                "rowlock_partition_outcomes_total",
                                f"{POOL}, {FAILED}",
                                by="namespace, pool, job_name",
                            )
                            + ")",
                            "",
                        )
                    ],
                    unit="short",
                    kind="table",
                    width=12,
                    decimals=0,
                ),
                Panel(
                    title="Executions that ended, 15 min",
                    text="By job and how they ended.",
                    queries=[
                        (
                            (
                                "max by (namespace, pool, job_name, status)"
                                f" (rowlock_executions_ended{{{POOL}}})"
                            ),
                            "",
                        )
                    ],
                    unit="short",
                    kind="table",
                    width=12,
                ),
            ],
        ),
    ],
)

NODES: Final = Page(
    uid="rowlock-nodes",
    title="rowlock: nodes",
    text="Who works, how busy they are, who was lost, and what became of their work.",
    pools=True,
    rows=[
        Row(
            question="Is it well?",
            panels=[
                LIVE_NODES,
                Panel(
                    title="Unreachable",
                    text="Nodes whose beats do not arrive. Within seconds they are back, or removed,"
                    " and their work goes to others.",
                    queries=[
                        (
                            (
                                "sum(max by (namespace, pool) (rowlock_nodes"
                                f'{{{POOL}, status="unreachable"}}))'
                            ),
                            "unreachable",
                        )
                    ],
                    unit="short",
                    kind="stat",
                    width=3,
                    levels=GOOD_IF_ZERO,
                ),
                Panel(
                    title="Draining",
                    text="Nodes that finish what they hold and then leave.",
                    queries=[
                        (
                            f"sum(max by (namespace, pool) (rowlock_nodes_draining{{{POOL}}}))",
                            "draining",
                        )
                    ],
                    unit="short",
                    kind="stat",
                    width=3,
                    levels=NEUTRAL,
                ),
                Panel(
                    title="Slots in use",
                    text="Share of all slots that run something.",
                    queries=[
                        (
                            (
                                f'sum(rowlock_slots{{{POOL}, state="used"}})'
                                f' / (sum(rowlock_slots{{{POOL}, state="total"}}) > 0)'
                            ),
                            "in use",
                        )
                    ],
                    unit="percentunit",
                    kind="stat",
                    width=3,
                    levels=NEUTRAL,
                    most=1,
                    decimals=0,
                ),
                Panel(
                    title="Quietest node",
                    text="How long ago the last beat of that node came that has been silent longest"
                    " and is not removed. Above half a minute nobody is there to remove it.",
                    queries=[
                        (
                            f"max(rowlock_nodes_oldest_heartbeat_age_seconds{{{POOL}}})",
                            "silent for",
                        )
                    ],
                    unit="s",
                    kind="stat",
                    width=3,
                    levels=((None, "green"), (10, "orange"), (60, "red")),
                    decimals=0,
                ),
                Panel(
                    title="Removed, 1 h",
                    text="Nodes that others removed because they had gone silent. One that is drained"
                    " leaves by itself and does not count.",
                    queries=[(hour("rowlock_nodes_removed_total"), "removed")],
                    unit="short",
                    kind="stat",
                    width=3,
                    levels=((None, "green"), (1, "orange"), (4, "red")),
                    decimals=0,
                ),
                Panel(
                    title="Outcome unknown",
                    text="AT_MOST_ONCE partitions that were lost with their node after their start, 1 h."
                    " Whether the work was done a person must find out (`rowlock resolve`).",
                    queries=[
                        (
                            hour(
                                "rowlock_partitions_lost_total", f'{POOL}, delivery="at_most_once"'
                            ),
                            "unknown",
                        )
                    ],
                    unit="short",
                    kind="stat",
                    width=3,
                    levels=GOOD_IF_ZERO,
                    decimals=0,
                ),
                Panel(
                    title="Last reaper pass",
                    text="How long ago any node last looked for claims whose node is gone. Every node"
                    " does so all the time.",
                    queries=[
                        (
                            (
                                "time() - max(rowlock_reaper_last_success_timestamp_seconds"
                                f"{{{POOL}}} > 0)"
                            ),
                            "ago",
                        )
                    ],
                    unit="s",
                    kind="stat",
                    width=3,
                    levels=((None, "green"), (60, "orange"), (120, "red")),
                    decimals=0,
                ),
            ],
        ),
        Row(
            question="What is slow?",
            panels=[
                Panel(
                    title="Heartbeat",
                    text="From sending a beat to its answer. Slow beats are the first sign of a"
                    " database that is at its limit; a fifth of ROWLOCK_UNREACHABLE_SECONDS is too much.",
                    queries=[
                        (quantile(q, "rowlock_heartbeat_duration_seconds"), f"p{q * 100:g}")
                        for q in (0.5, 0.99)
                    ],
                    unit="s",
                ),
                Panel(
                    title="Claims by result",
                    text="claimed: it brought work. empty: there was none. conflict: a lock was held"
                    " for too long. error: the database did not answer.",
                    queries=[(rate("rowlock_claim_polls_total", by="result"), "{{result}}")],
                    unit="ops",
                    kind="stack",
                ),
                Panel(
                    title="Statements, 95th percentile",
                    text="From sending a statement to its answer, for the operations of nodes.",
                    queries=[
                        (
                            quantile(0.95, "rowlock_db_query_duration_seconds", NS, by="operation"),
                            "{{operation}}",
                        )
                    ],
                    unit="s",
                ),
            ],
        ),
        Row(
            question="Where?",
            panels=[
                Panel(
                    title="Nodes by status",
                    text="By pool. unreachable ones are between silence and removal.",
                    queries=[
                        (
                            f"max by (namespace, pool, status) (rowlock_nodes{{{POOL}}})",
                            "{{pool}} {{status}}",
                        )
                    ],
                    unit="short",
                    kind="states",
                    width=12,
                    levels=NEUTRAL,
                ),
                Panel(
                    title="Slots in use by pod",
                    text="Whether the work is spread evenly. 0: it does nothing; 1: all its slots are"
                    " taken.",
                    queries=[
                        (
                            (
                                f'sum by (pod) (rowlock_slots{{{POOL}, state="used"}}) / (sum by (pod)'
                                f' (rowlock_slots{{{POOL}, state="total"}}) > 0)'
                            ),
                            "{{pod}}",
                        )
                    ],
                    unit="percentunit",
                    kind="states",
                    width=12,
                    levels=(
                        (None, "dark-blue"),
                        (0.25, "blue"),
                        (0.75, "green"),
                        (1, "dark-green"),
                    ),
                    most=1,
                    decimals=0,
                ),
                Panel(
                    title="Claimed by pod",
                    text="Partitions that each node claims, each second.",
                    queries=[(rate("rowlock_partition_claims_total", by="pod"), "{{pod}}")],
                    unit="ops",
                ),
                Panel(
                    title="Failed heartbeats by pod",
                    text="Beats without an answer. One pod: its machine or its network. All pods: the"
                    " database.",
                    queries=[(rate("rowlock_heartbeat_failures_total", by="pod"), "{{pod}}")],
                    unit="ops",
                ),
                Panel(
                    title="Clock offset by pod",
                    text="How far a pod's clock is ahead of the database's. Nothing is decided by it,"
                    " but logs are read by it.",
                    queries=[
                        (
                            f"max by (pod) (abs(rowlock_node_clock_offset_seconds{{{POOL}}}))",
                            "{{pod}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    title="Processor by pod",
                    text="Cores that a node uses: the supervisor, its executors and what author code"
                    " has started. A pool at its limit with a long queue needs more pods, not more slots.",
                    queries=[(rate("rowlock_node_cpu_seconds_total", by="pod"), "{{pod}}")],
                    unit="short",
                ),
                Panel(
                    title="Memory by pod",
                    text="Resident memory of the same processes. What climbs towards the limit of its"
                    " container is killed there: `ROWLOCK_EXECUTOR_MEMORY_MB` renews executors before.",
                    queries=[(f"max by (pod) (rowlock_node_memory_bytes{{{POOL}}})", "{{pod}}")],
                    unit="bytes",
                ),
                Panel(
                    title="Named locks",
                    text="How requests for `ctx.lock` ended: at once, after a wait, or not at all. Slots"
                    " that wait do no work: many waits ask for smaller locks, or for a limit on parallelism.",
                    queries=[(rate("rowlock_lock_acquisitions_total", by="result"), "{{result}}")],
                    unit="ops",
                    kind="stack",
                ),
                Panel(
                    title="Lost and moved work, 1 h",
                    text="What became of the claims of lost nodes: moved to others, failed for good"
                    " because no node survives it (at_least_once), or outcome unknown (at_most_once).",
                    queries=[
                        (
                            hour("rowlock_partitions_reassigned_total", by="reason"),
                            "moved, {{reason}}",
                        ),
                        (
                            hour("rowlock_partitions_lost_total", by="delivery"),
                            "failed, {{delivery}}",
                        ),
                    ],
                    unit="short",
                ),
                Panel(
                    title="Executors that died by pod, 1 h",
                    text="Processes of author code that ended although nobody had ended them: out of"
                    " memory, a crash in a library.",
                    queries=[(hour("rowlock_executor_deaths_total", by="pod"), "{{pod}}")],
                    unit="short",
                ),
                Panel(
                    title="Late writes and ended leases by pod, 1 h",
                    text="fenced: a write came after its claim was taken away, and changed nothing."
                    " lease: the node heard nothing from the database and stopped its work by itself.",
                    queries=[
                        (hour("rowlock_fenced_writes_total", by="pod"), "{{pod}} fenced"),
                        (hour("rowlock_lease_ends_total", by="pod"), "{{pod}} lease"),
                    ],
                    unit="short",
                ),
                Panel(
                    title="Masters that took over, 1 h",
                    text="Executions whose master was lost and that another node goes on with.",
                    queries=[(hour("rowlock_master_takeovers_total", by="pod"), "{{pod}}")],
                    unit="short",
                ),
                Panel(
                    title="Versions",
                    text="Pods by the version of rowlock that they run; two during an upgrade.",
                    queries=[
                        (f"count by (version) (rowlock_build_info{{{NS}}})", "{{version}}"),
                    ],
                    unit="short",
                    kind="stack",
                ),
                Panel(
                    title="Slots by pool",
                    text="Slots of nodes that are active and do not drain: what can run at a time.",
                    queries=[
                        (
                            f"max by (namespace, pool) (rowlock_pool_slots{{{POOL}}})",
                            "{{pool}}",
                        )
                    ],
                    unit="short",
                ),
            ],
        ),
    ],
)

OPERATOR: Final = Page(
    uid="rowlock-operator",
    title="rowlock: operator and database",
    text="Whether BatchJobs are looked after, and how the database is.",
    pools=False,
    rows=[
        Row(
            question="Is it well?",
            panels=[
                Panel(
                    title="Operators",
                    text="Running operators. Without one executions go on; new BatchJobs wait. Empty:"
                    " there is none.",
                    queries=[
                        (
                            f"count(rowlock_operator_queue_depth{{{NS}}}) or vector(0)",
                            "operators",
                        )
                    ],
                    unit="short",
                    kind="stat",
                    width=3,
                    levels=BAD_IF_ZERO,
                ),
                Panel(
                    title="Last sync",
                    text="How long ago the operator last heard from the database what has changed.",
                    queries=[
                        (
                            f"time() - max(rowlock_operator_last_sync_timestamp_seconds{{{NS}}} > 0)",
                            "ago",
                        )
                    ],
                    unit="s",
                    kind="stat",
                    width=3,
                    levels=((None, "green"), (60, "orange"), (300, "red")),
                    decimals=0,
                ),
                Panel(
                    title="Last list",
                    text="How long ago the operator last listed all BatchJobs. It does so every minute"
                    " or so, whatever the watch brings.",
                    queries=[
                        (
                            f"time() - max(rowlock_operator_last_list_timestamp_seconds{{{NS}}} > 0)",
                            "ago",
                        )
                    ],
                    unit="s",
                    kind="stat",
                    width=3,
                    levels=((None, "green"), (180, "orange"), (600, "red")),
                    decimals=0,
                ),
                Panel(
                    title="Database",
                    text="Whether the database answers everybody who asks it.",
                    queries=[(f"min(rowlock_database_up{{{NS}}})", "database")],
                    unit="none",
                    kind="stat",
                    width=3,
                    levels=BAD_IF_ZERO,
                    words={"0": "away", "1": "up"},
                ),
                Panel(
                    title="Connections",
                    text="Sessions of the server, of those that it allows.",
                    queries=[
                        (
                            (
                                f"max(rowlock_database_connections{{{NS}}})"
                                f" / max(rowlock_database_connections_max{{{NS}}})"
                            ),
                            "in use",
                        )
                    ],
                    unit="percentunit",
                    kind="stat",
                    width=3,
                    levels=((None, "green"), (0.7, "orange"), (0.9, "red")),
                    most=1,
                    decimals=0,
                ),
                Panel(
                    title="Vacuum held back for",
                    text="For how long the oldest transaction has been the same one: so long nothing"
                    " that died since can be vacuumed, and claims become slower.",
                    queries=[(f"max(rowlock_xmin_held_seconds{{{NS}}})", "held")],
                    unit="s",
                    kind="stat",
                    width=3,
                    levels=((None, "green"), (600, "orange"), (1800, "red")),
                    decimals=0,
                ),
                Panel(
                    title="Exporter",
                    text="Whether the exporter reads everything it is to read. 0: something is missing"
                    " in these pages.",
                    queries=[
                        (
                            (
                                "min(max by (namespace, reading)"
                                f" (rowlock_exporter_reading_up{{{NS}}})) or vector(0)"
                            ),
                            "readings",
                        )
                    ],
                    unit="none",
                    kind="stat",
                    width=3,
                    levels=BAD_IF_ZERO,
                    words={"0": "incomplete", "1": "complete"},
                ),
                Panel(
                    title="Schema",
                    text="The newest migration that the database has had.",
                    queries=[(f"max(rowlock_schema_version{{{NS}}})", "version")],
                    unit="none",
                    kind="stat",
                    width=3,
                    levels=NEUTRAL,
                ),
            ],
        ),
        Row(
            question="What is slow?",
            panels=[
                Panel(
                    title="Looks at BatchJobs",
                    text="How long one look takes, with everything that it leads to.",
                    queries=[
                        (
                            quantile(q, "rowlock_operator_reconcile_duration_seconds", NS),
                            f"p{q * 100:g}",
                        )
                        for q in (0.5, 0.95)
                    ],
                    unit="s",
                ),
                Panel(
                    title="BatchJobs that wait for a look",
                    text="Normally near 0. A number that stays: the operator cannot keep up, or its"
                    " API server or database is slow.",
                    queries=[(f"max by (pod) (rowlock_operator_queue_depth{{{NS}}})", "{{pod}}")],
                    unit="short",
                ),
                Panel(
                    title="Readings of the exporter",
                    text="How long each reading takes; after two seconds it is given up.",
                    queries=[
                        (
                            f"max by (reading) (rowlock_exporter_reading_duration_seconds{{{NS}}})",
                            "{{reading}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    title="Statements of nodes, 95th percentile",
                    text="From sending a statement to its answer.",
                    queries=[
                        (
                            quantile(0.95, "rowlock_db_query_duration_seconds", NS, by="operation"),
                            "{{operation}}",
                        )
                    ],
                    unit="s",
                    width=12,
                ),
                Panel(
                    title="Statements of nodes",
                    text="How many statements they send each second, by operation.",
                    queries=[
                        (
                            rate("rowlock_db_query_duration_seconds_count", NS, by="operation"),
                            "{{operation}}",
                        )
                    ],
                    unit="ops",
                    kind="stack",
                    width=12,
                ),
            ],
        ),
        Row(
            question="Where?",
            panels=[
                Panel(
                    title="Failed looks by reason",
                    text="They come again by themselves. api: the API server. database: PostgreSQL."
                    " conflict: somebody else wrote first. internal: a fault of ours.",
                    queries=[
                        (
                            rate("rowlock_operator_reconcile_errors_total", NS, by="reason"),
                            "{{reason}}",
                        )
                    ],
                    unit="ops",
                    kind="stack",
                ),
                Panel(
                    title="Jobs of master runs",
                    text="created; exists: another operator was quicker; conflict: a Job of that name"
                    " belongs to somebody else.",
                    queries=[
                        (rate("rowlock_operator_jobs_created_total", NS, by="result"), "{{result}}")
                    ],
                    unit="ops",
                    kind="stack",
                ),
                Panel(
                    title="Status patches by answer",
                    text="200: written. 409: somebody else wrote first; it comes again. 0: no answer.",
                    queries=[
                        (rate("rowlock_operator_status_patches_total", NS, by="code"), "{{code}}")
                    ],
                    unit="ops",
                    kind="stack",
                ),
                Panel(
                    title="Executions whose BatchJob was gone, 1 h",
                    text="Cancelled by the sweeper, because their BatchJob was deleted while no"
                    " operator was there.",
                    queries=[(hour("rowlock_operator_executions_swept_total", NS), "swept")],
                    unit="short",
                ),
                Panel(
                    title="Last event of a watch",
                    text="How long ago the API server last sent anything. Long is normal where nothing"
                    " happens.",
                    queries=[
                        (
                            (
                                "time() - max by (pod)"
                                f" (rowlock_operator_watch_last_event_timestamp_seconds{{{NS}}} > 0)"
                            ),
                            "{{pod}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    title="Dead rows by table",
                    text="Rows that a vacuum is to remove. They come and go; a line that only climbs"
                    " means that somebody holds vacuum back.",
                    queries=[
                        (
                            f"max by (table) (rowlock_table_dead_tuples{{{NS}}})",
                            "{{table}}",
                        )
                    ],
                    unit="short",
                ),
                Panel(
                    title="Living rows by table",
                    text="As the server estimates them.",
                    queries=[
                        (
                            f"max by (table) (rowlock_table_live_tuples{{{NS}}})",
                            "{{table}}",
                        )
                    ],
                    unit="short",
                ),
                Panel(
                    title="Size by table",
                    text="With indexes. `rowlock purge` takes old executions away.",
                    queries=[(f"max by (table) (rowlock_table_bytes{{{NS}}})", "{{table}}")],
                    unit="bytes",
                    kind="stack",
                ),
                Panel(
                    title="Oldest transaction",
                    text="Transactions begun since the oldest one that somebody holds on to.",
                    queries=[(f"max(rowlock_xmin_age_transactions{{{NS}}})", "transactions")],
                    unit="short",
                ),
                Panel(
                    title="Queue of notifications",
                    text="How full it is. A session that listens and never reads fills it up.",
                    queries=[(f"max(rowlock_notify_queue_usage_ratio{{{NS}}})", "in use")],
                    unit="percentunit",
                    width=12,
                ),
                Panel(
                    title="Who reaches the database",
                    text="1: its last question was answered.",
                    queries=[
                        (
                            f"min by (component) (rowlock_database_up{{{NS}}})",
                            "{{component}}",
                        )
                    ],
                    unit="none",
                    kind="states",
                    width=12,
                    levels=BAD_IF_ZERO,
                    words={"0": "away", "1": "up"},
                ),
            ],
        ),
    ],
)

PAGES: Final = (QUEUES, NODES, OPERATOR)


def rendered() -> dict[str, str]:
    """The text of each file, by its name."""
    return {
        f"{page.uid.removeprefix('rowlock-')}.json": JSONEncoder(sort_keys=True, indent=1).encode(
            build(page, [other for other in PAGES if other is not page])
        )
        + "\n"
        for page in PAGES
    }


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
