"""Launch files are read by accelerate itself, and say how they are started."""

import re
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
FILES = {
    "one_gpu.yaml": ("NO", 1),
    "eight_gpus.yaml": ("MULTI_GPU", 8),
}


def test_every_file_is_known_here():
    assert {path.name for path in LAUNCH.iterdir()} == {
        *FILES,
        "ray.kubernetes.yaml",
        "ray.slurm",
        "several_nodes.slurm",
        "shards.slurm",
    }


@pytest.mark.parametrize("name", FILES)
def test_accelerate_reads_the_file_and_the_command_in_its_comment(name, monkeypatch):
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    config = ClusterConfig.from_yaml_file(LAUNCH / name)
    assert (config.distributed_type.value, config.num_processes) == FILES[name]
    (command,) = re.findall(r"# .*Start: accelerate launch (.+)", (LAUNCH / name).read_text())
    monkeypatch.chdir(LAUNCH.parent)
    arguments = launch_command_parser().parse_args(command.split())
    assert arguments.module
    assert arguments.training_script == "sinklab"
    assert arguments.training_script_args[0] == "train"
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.num_processes == FILES[name][1]
    assert arguments.multi_gpu is (name == "eight_gpus.yaml")


def test_tasks_of_an_array_are_shards_counted_from_zero():
    script = f"""
    srun() {{ echo "$*"; }}
    export SLURM_ARRAY_TASK_ID=6 SLURM_ARRAY_TASK_MIN=4 SLURM_ARRAY_TASK_COUNT=3
    set -- trace "The sea"
    . {LAUNCH / "shards.slurm"}
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout == "python -m sinklab trace The sea --shard 2/3\n", done


def test_the_slurm_script_hands_its_arguments_to_the_command():
    path = LAUNCH / "several_nodes.slurm"
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    # as the last process of two nodes, with tools that only say what they were given
    script = f"""
    scontrol() {{ printf 'node1\\nnode2\\n'; }}
    srun() {{ echo "$1"; shift; SLURM_PROCID=15 SLURM_LOCALID=7 "$@"; }}
    python() {{
      local ranks="$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE"
      echo "$MASTER_ADDR:$MASTER_PORT $ranks: $*"
    }}
    export -f python
    # a function cannot be what a process becomes
    exec() {{ "$@"; }}
    export -f exec
    export SLURM_JOB_NODELIST=node[1-2] SLURM_NTASKS=16
    set -- qwen-1.5b --corpus "a b" --streaming
    . {path}
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = "node1:29500 15/16 7/8: -m sinklab train qwen-1.5b --corpus a b --streaming"
    assert done.stdout.splitlines() == ["--kill-on-bad-exit=1", said]
    assert "\n#SBATCH --signal=TERM@" in path.read_text(), (
        "the processes are told before the time is over"
    )
