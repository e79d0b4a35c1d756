#!/usr/bin/env bash
# Runs a command and ends it, with what it started, when standard input ends: a connection that breaks leaves
# nothing behind.
#   bash recipes/launch/node.sh command [arguments]
# The first lines of standard input, up to an empty one, are variables as bash writes them (NAME='text'):
# secrets, which would be seen in the list of processes if they were arguments.
while IFS= read -r secret && [[ -n $secret ]]; do eval "export $secret"; done
tied=() # the command ends with this process, even if that is killed
if command -v setpriv >/dev/null; then tied=(setpriv --pdeathsig TERM); fi
set -m # the command has a process group of its own
"${tied[@]}" "$@" </dev/null &
command=$!
{
  cat >/dev/null
  kill -TERM -- "-$command" 2>/dev/null # torchrun hands it on to its ranks and ends those that do not end
} <&0 &
guard=$!
exec 2>/dev/null # what is left to say is bash's own about ended jobs
wait "$command"
status=$?
kill -KILL -- "-$guard"
exit "$status"
