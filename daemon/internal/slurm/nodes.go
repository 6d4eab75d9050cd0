package slurm

import (
	"context"
	"errors"
	"strings"
)

// NodeGres is Gres= of every node, by name.
func (c *Commands) NodeGres(ctx context.Context) (map[string]string, error) {
	out, err := c.run(ctx, "scontrol", "--oneliner", "show", "nodes")
	if err != nil {
		return nil, err
	}
	return parseNodes(out)
}

func parseNodes(text string) (map[string]string, error) {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		name, gres := "", ""
		for f := range strings.FieldsSeq(line) {
			switch k, v, _ := strings.Cut(f, "="); {
			case k == "NodeName" && name == "":
				name = v
			case k == "Gres" && gres == "" && !none(v):
				gres = v
			}
		}
		if name != "" {
			out[name] = gres
		}
	}
	if len(out) == 0 {
		return nil, errors.New("scontrol show nodes: no node in it")
	}
	return out, nil
}

// Partitions are the names of the cluster's partitions.
func (c *Commands) Partitions(ctx context.Context) ([]string, error) {
	out, err := c.run(ctx, "scontrol", "--oneliner", "show", "partitions")
	if err != nil {
		return nil, err
	}
	return parsePartitions(out), nil
}

func parsePartitions(text string) []string {
	var out []string
	for line := range strings.Lines(text) {
		if name, ok := strings.CutPrefix(line, "PartitionName="); ok {
			out = append(out, strings.Fields(name + " ")[0])
		}
	}
	return out
}

// NodeState is what Slurm says of a node: its state, as IDLE+DRAIN, and the reason of a drain, "" for none.
func (c *Commands) NodeState(ctx context.Context, node string) (state, reason string, err error) {
	out, err := c.run(ctx, "scontrol", "--oneliner", "show", "node", node)
	if err != nil {
		return "", "", err
	}
	return parseNodeState(out)
}

func parseNodeState(line string) (state, reason string, err error) {
	_, rest, ok := strings.Cut(line, " State=")
	if !ok {
		return "", "", errors.New("scontrol show node: no State in it")
	}
	state, rest, _ = strings.Cut(rest, " ")
	// The reason is the last field but for a comment; [root@2026-11-23T06:00:00] is behind it.
	if _, text, ok := strings.Cut(" "+rest, " Reason="); ok {
		text, _, _ = strings.Cut(text, " Comment=")
		if i := strings.LastIndex(text, " ["); i >= 0 {
			text = text[:i]
		}
		reason = strings.TrimSpace(text)
	}
	return state, reason, nil
}

// DrainNode keeps new jobs from a node; those that run go on.
func (c *Commands) DrainNode(ctx context.Context, node, reason string) error {
	_, err := c.run(ctx, "scontrol", "update", "nodename="+node, "state=DRAIN", "reason="+plain(reason))
	return err
}

// ResumeNode lets jobs onto a node again.
func (c *Commands) ResumeNode(ctx context.Context, node string) error {
	_, err := c.run(ctx, "scontrol", "update", "nodename="+node, "state=RESUME")
	return err
}
