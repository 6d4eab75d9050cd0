package slurm

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// FoldHosts writes a list of nodes as Slurm does, node[001-120],gpu7: it is what ParseHosts reads. Numbers are folded at the
// end of a name only.
func FoldHosts(nodes []string) string {
	type series struct {
		prefix string
		width  int // of numbers with zeros before them, 0 for others
	}
	numbers := map[series][]uint64{}
	padded := map[series]bool{}
	var order []series
	split := func(name string) (prefix, digits string) {
		i := len(name)
		for i > 0 && len(name)-i < 9 && name[i-1] >= '0' && name[i-1] <= '9' {
			i--
		}
		return name[:i], name[i:]
	}
	nodes = slices.Compact(slices.Sorted(slices.Values(nodes)))
	for _, name := range nodes {
		if prefix, digits := split(name); len(digits) > 1 && digits[0] == '0' {
			padded[series{prefix, len(digits)}] = true
		}
	}
	for _, name := range nodes {
		prefix, digits := split(name)
		s := series{prefix, len(digits)}
		if digits == "" {
			s.width = -1 // a name without a number
		} else if !padded[s] {
			s.width = 0
		}
		if numbers[s] == nil {
			order = append(order, s)
		}
		n, _ := strconv.ParseUint("0"+digits, 10, 64)
		numbers[s] = append(numbers[s], n)
	}
	slices.SortStableFunc(order, func(a, b series) int { return cmp.Or(strings.Compare(a.prefix, b.prefix), a.width-b.width) })
	var out []string
	for _, s := range order {
		switch list := numbers[s]; {
		case s.width < 0:
			out = append(out, s.prefix)
		case len(list) == 1:
			out = append(out, fmt.Sprintf("%s%0*d", s.prefix, s.width, list[0]))
		default:
			out = append(out, s.prefix+"["+ranges(list, s.width)+"]")
		}
	}
	return strings.Join(out, ",")
}

// ranges is a list of numbers as 1-3,7.
func ranges(list []uint64, width int) string {
	slices.Sort(list)
	var out []string
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		text := fmt.Sprintf("%0*d", width, list[i])
		if j > i {
			text += fmt.Sprintf("-%0*d", width, list[j])
		}
		out, i = append(out, text), j+1
	}
	return strings.Join(out, ",")
}

// DrainsWith are the nodes that Slurm has drained, with a reason that begins so, and their reasons.
func (c *Commands) DrainsWith(ctx context.Context, prefix string) (map[string]string, error) {
	out, err := c.run(ctx, "scontrol", "--oneliner", "show", "nodes")
	if err != nil {
		return nil, err
	}
	return parseDrains(out, prefix), nil
}

func parseDrains(text, prefix string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		name, ok := strings.CutPrefix(line, "NodeName=")
		if !ok {
			continue
		}
		name, _, _ = strings.Cut(name, " ")
		state, reason, err := parseNodeState(strings.TrimSpace(line))
		if err == nil && name != "" && strings.Contains(state, "DRAIN") && strings.HasPrefix(reason, prefix) {
			out[name] = reason
		}
	}
	return out
}
