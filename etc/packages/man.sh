#!/bin/bash
# man.sh BIN DIR: manual pages of what `sluice man` has none for, into DIR: sluiced(8), sluice-worker(8) and sluice-hook(8)
# from what the programs print of themselves, and sluice.yaml(5) from etc/sluice.yaml, which a test compares with the
# daemon's own defaults. The date is SOURCE_DATE_EPOCH's.
set -euo pipefail
repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
bin=$(cd -- "$1" && pwd) dir=$2
date=$(date -u -d "@${SOURCE_DATE_EPOCH:-$(date +%s)}" +%Y-%m-%d)

# verbatim: text as it stands. A backslash, and a dot or an apostrophe that begins a line, are roff's.
verbatim() { sed -e 's/\\/\\e/g' -e 's/-/\\-/g' -e "s/^\\([.']\\)/\\\\\&\\1/"; }

# page NAME SECTION SUMMARY SEE-ALSO: around the text on standard input.
page() {
	{
		printf '.TH "%s" "%s" "%s" "Sluice" "Sluice"\n.nh\n.SH NAME\n%s \\- %s\n.SH DESCRIPTION\n.nf\n' \
			"${1^^}" "$2" "$date" "$1" "$3"
		verbatim
		printf '.fi\n.SH SEE ALSO\n%s\n' "$4"
	} >"$dir/$1.$2"
}

mkdir -p "$dir"
"$bin/sluiced" --help | page sluiced 8 "node daemon: lends this node's GPUs, and gets fractions of GPUs for its jobs" 'sluice(1), sluice-worker(8), sluice.yaml(5)'
HOME=/root "$bin/sluice-worker" --help | page sluice-worker 8 "lends this machine's GPUs to remote programs" 'sluice(1), sluiced(8)'
{ "$bin/sluice-hook" 2>&1 || true; } | page sluice-hook 8 "brings a job's GPU fraction into containers" 'sluice(1), sluiced(8)'
page sluice.yaml 5 'configuration of sluiced' 'sluiced(8), sluice\-health(1)' <"$repo/etc/sluice.yaml"
