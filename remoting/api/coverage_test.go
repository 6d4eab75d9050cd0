package api

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// mostRefused is how many of a hundred functions of cuda.h 13.0 may be refused.
const mostRefused = 6

// TestCoverageCountsTheHeader: what docs/coverage.md counts as declared by cuda.h 13.0 is what that header
// declares to a program.
func TestCoverageCountsTheHeader(t *testing.T) {
	counted := map[string]bool{}
	for symbol, header := range declaredBy(rows(t)) {
		if header == "cuda.h" {
			counted[symbol] = true
		}
	}
	for _, h := range headers(t) {
		dir := filepath.Dir(h)
		text, err := exec.Command("gcc", "-E", "-dM", "-I", dir, h).Output()
		if err != nil {
			t.Fatalf("%s: %v", h, err)
		}
		if !regexp.MustCompile(`(?m)^#define CUDA_VERSION 13000$`).Match(text) {
			continue
		}
		if text, err = exec.Command("gcc", "-E", "-P", "-I", dir, h).Output(); err != nil {
			t.Fatalf("%s: %v", h, err)
		}
		there := map[string]bool{}
		for _, m := range declared.FindAllSubmatch(text, -1) {
			there[string(m[1])] = true
			if !counted[string(m[1])] {
				t.Errorf("%s declares %s, which coverage.md does not count", h, m[1])
			}
		}
		for symbol := range counted {
			if !there[symbol] {
				t.Errorf("coverage.md counts %s, which %s does not declare", symbol, h)
			}
		}
	}
}

// TestFewAreRefused holds the share of refused functions where it is.
func TestFewAreRefused(t *testing.T) {
	all, refused := 0, []string{}
	headers := declaredBy(rows(t))
	for _, r := range rows(t) {
		if headers[r.Symbol] != "cuda.h" {
			continue
		}
		all++
		if r.Kind == Refuse {
			refused = append(refused, r.Symbol)
		}
	}
	if 100*len(refused) > mostRefused*all {
		t.Errorf("%d of %d functions of cuda.h 13.0 are refused, more than %d %%: %s", len(refused), all, mostRefused, strings.Join(refused, " "))
	}
}

// TestDeniedAttributesHaveReasons: docs/limits.md says of each device attribute that the shim does not take from the GPU why.
func TestDeniedAttributesHaveReasons(t *testing.T) {
	code, err := os.ReadFile("../client/device.c")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/limits.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, found := strings.Cut(string(code), "static bool attribute_denied")
	list, _, ended := strings.Cut(list, "return true;")
	names := regexp.MustCompile(`CU_DEVICE_ATTRIBUTE_(\w+)`).FindAllStringSubmatch(list, -1)
	if !found || !ended || len(names) < 20 {
		t.Fatalf("attribute_denied in device.c has %d names", len(names))
	}
	for _, n := range names {
		if !strings.Contains(string(page), "`"+n[1]+"`") {
			t.Errorf("docs/limits.md does not name %s", n[1])
		}
	}
}
