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
