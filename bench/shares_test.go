package bench_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// The figures of docs/shares.md are those of the raw log.
func TestSharesPage(t *testing.T) {
	const program, log = "shares/table.py", "logs/shares/shares.jsonl"
	rows, err := exec.Command("python3", program, "--page", log).Output()
	if err != nil {
		t.Fatalf("%s --page %s: %v", program, log, err)
	}
	page, err := os.ReadFile("../docs/shares.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), string(rows)) {
		t.Errorf("docs/shares.md has other figures than %s --page %s prints", program, log)
	}
	all, err := exec.Command("python3", program, log).Output()
	if err != nil {
		t.Fatalf("%s %s: %v", program, log, err)
	}
	table, err := os.ReadFile("logs/shares/table.txt")
	if err != nil {
		t.Fatal(err)
	}
	if string(all) != string(table) {
		t.Errorf("logs/shares/table.txt is not what %s %s prints", program, log)
	}
}
