package site

import (
	"slices"
	"strings"
)

// YAML writes dotted keys as the nested mappings of sluice.yaml. Values stand as they are.
func YAML(keys map[string]string) string {
	names := make([]string, 0, len(keys))
	for k := range keys {
		names = append(names, k)
	}
	// Siblings are neighbours once the dot sorts before every letter.
	slices.SortFunc(names, func(a, b string) int {
		return slices.Compare(strings.Split(a, "."), strings.Split(b, "."))
	})
	var b strings.Builder
	var open []string
	for _, name := range names {
		path := strings.Split(name, ".")
		same := 0
		for same < len(open) && same < len(path)-1 && open[same] == path[same] {
			same++
		}
		open = append(open[:same:same], path[same:len(path)-1]...)
		for i := same; i < len(path)-1; i++ {
			b.WriteString(strings.Repeat("  ", i) + path[i] + ":\n")
		}
		b.WriteString(strings.Repeat("  ", len(path)-1) + path[len(path)-1] + ": " + keys[name] + "\n")
	}
	return b.String()
}
