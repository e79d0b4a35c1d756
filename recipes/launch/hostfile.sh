#!/usr/bin/env bash
# A recipe on every node of a hostfile, over ssh:
#   bash recipes/launch/hostfile.sh hosts.txt recipes/llama3_70b_ppo.sh [settings]
# Lines such as `worker-0 slots=8`; # begins a comment. All hosts see this folder under the same path. They
# meet at the first one, and torchrun numbers the ranks host by host, in the alphabetical order of their
# names. Everything is printed with its host's name and kept in LOGS (outputs/launch/JOB), one file a node.
# When a node fails, on SIGINT and on SIGTERM all nodes get SIGTERM, on which a run saves; also when this
# process or a connection is gone. Exit status: that of the first failure. Environment: SSH (the command that
# takes a host and a line of shell), MASTER_PORT (29500), and forwarded.txt.
set -euo pipefail
LAUNCH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
  echo "hostfile.sh: $*" >&2
  exit 2
}

read_hosts() { # file: `hosts`, and `slots` of each
  local line number=0 host count extra
  [[ -r $1 ]] || fail "hostfile $1 cannot be read; name a file with lines such as: worker-0 slots=8"
  hosts=() slots=
  while read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    read -r host count extra <<<"${line%%#*}" || true
    [[ -n $host ]] || continue
    [[ -z $extra && $host =~ ^([A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*$ && $count =~ ^slots=[1-9][0-9]*$ ]] ||
      fail "$1, line $number: '${line:0:80}' is not understood; write a host and its GPUs: worker-0 slots=8"
    [[ " ${hosts[*]} " != *" $host "* ]] ||
      fail "$1, line $number: $host stands there twice; name each host once, with all its slots"
    [[ -z $slots || $slots == "${count#slots=}" ]] ||
      fail "$1, line $number: $count, and hosts before it have slots=$slots; every node starts as many ranks: use the smallest number"
    hosts+=("$host") slots=${count#slots=}
  done <"$1"
  ((${#hosts[@]})) || fail "$1 names no host; write lines such as: worker-0 slots=8"
}

forwarded() { # "secret" or "plain": assignments of the variables that nodes get from here
  local name kind pattern patterns
  mapfile -t patterns < <(grep -v '^#' "$LAUNCH/forwarded.txt")
  for name in $(compgen -e); do
    kind=plain
    if [[ $name =~ TOKEN|KEY|SECRET|PASSW ]]; then kind=secret; fi
    for pattern in "${patterns[@]}"; do
      if [[ $kind == "$1" && $name == $pattern ]]; then printf '%s\n' "$name=${!name@Q}"; fi
    done
  done
}

line_for() { # node: the line of shell that it gets
  local address=${hosts[$1]#*@} name pairs=()
  for name in NNODES=${#hosts[@]} GPUS="$slots" NODE_RANK="$1" NODE_ADDR="$address" MASTER_ADDR="${hosts[0]#*@}" MASTER_PORT="$MASTER_PORT" JOB_ID="$JOB_ID"; do
    pairs+=("${name%%=*}=$(printf %q "${name#*=}")")
  done
  echo "cd ${PWD@Q} && $(forwarded plain | tr '\n' ' ')${pairs[*]} exec bash ${LAUNCH@Q}/node.sh bash ${recipe[*]@Q}"
}

run_node() { # node: until it has ended, which `ended` learns
  local host=${hosts[$1]} status=0
  # secrets go through the connection; on a command line everybody on either host could read them
  "${ssh[@]}" "$host" "$(line_for "$1")" < <(forwarded secret && echo && exec cat <"$LOGS/hold") 2>&1 | tee "$LOGS/$host.log" | sed -u "s/^/$host: /" || status=$?
  echo "$host $status" >&"$ended"
}

ask_to_end() { # why: standard input of all nodes ends
  [[ -z $deadline ]] || return 0
  echo "hostfile.sh: $1: ending all nodes" >&2
  exec {hold}>&-
  deadline=$((SECONDS + STOP_S))
}

whole_number() { # name, least, most: of a variable
  [[ ${!1} =~ ^[0-9]{1,9}$ ]] && ((10#${!1} >= $2 && 10#${!1} <= $3)) ||
    fail "$1=${!1@Q} has to be a whole number from $2 to $3"
}

[[ $# -ge 2 ]] || fail "two arguments are needed, a hostfile and a recipe; see the head of this file"
MASTER_PORT=${MASTER_PORT:-29500}
whole_number MASTER_PORT 1 65535
# From asking nodes to end to cutting their connections; they need TORCH_ELASTIC_SHUTDOWN_TIMEOUT, 40 s
STOP_S=${STOP_S:-90}
whole_number STOP_S 1 999999999 # bash would compute with a variable's text, and run what it finds there
# Seconds of these in which a run may end its iteration.
export GRACE_S=${GRACE_S:-$((STOP_S > 20 ? STOP_S - 10 : STOP_S))}
read_hosts "$1"
recipe=("${@:2}")
[[ -f ${recipe[0]} ]] ||
  fail "recipe '${recipe[0]}' does not exist; choose one of $(cd "$LAUNCH/../.." && echo recipes/*.sh)"
export VERL_MEGATRON_TOKEN=${VERL_MEGATRON_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')} # of this run
JOB_ID=$(date +%Y%m%d_%H%M%S)_$$
LOGS=${LOGS:-outputs/launch/$JOB_ID}
read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=30}"
if [[ " $* " == *" --dry-run "* ]]; then
  for node in "${!hosts[@]}"; do echo "${hosts[$node]}: ${ssh[*]} ${hosts[$node]} $(line_for "$node")"; done
  NNODES=${#hosts[@]} GPUS=$slots MASTER_ADDR=${hosts[0]#*@} NODE_ADDR=${hosts[0]#*@} JOB_ID=$JOB_ID exec bash "${recipe[@]}"
fi

mkdir -p "$LOGS"
mkfifo "$LOGS/hold" "$LOGS/ended"
exec {hold}<>"$LOGS/hold" {ended}<>"$LOGS/ended"
trap 'rm -f "$LOGS/hold" "$LOGS/ended"' EXIT
deadline= first=0
trap '((first)) || first=130; ask_to_end SIGINT' INT
trap '((first)) || first=143; ask_to_end SIGTERM' TERM
set -m # nodes' connections have process groups of their own, so that Ctrl-C reaches this process only
for node in "${!hosts[@]}"; do (run_node "$node") {hold}>&- & done
echo "hostfile.sh: ${#hosts[@]} nodes of $slots ranks; logs are in $LOGS"
left=${#hosts[@]}
while ((left)); do
  if read -r -t 1 -u "$ended" host status; then
    left=$((left - 1))
    if ((status)); then
      ((first)) || first=$status
      ask_to_end "$host ended with $status"
    fi
  elif [[ -n $deadline ]] && ((SECONDS > deadline)); then
    echo "hostfile.sh: $left nodes have not ended within $STOP_S s; look there for what is left" >&2
    mapfile -t groups < <(jobs -p)
    kill -KILL -- "${groups[@]/#/-}" 2>/dev/null || true
    break
  fi
done
exit "$first"
