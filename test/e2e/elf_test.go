package e2e

import (
	"debug/elf"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// What the shim may need at run time: it must load wherever NVIDIA's own libraries load.
var allowedNeeded = []string{"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}

const (
	newestGlibc = 17  // GLIBC_2.17
	largestTLS  = 512 // bytes: within the reserve of the loader even if it were all static
)

// TestShimELF checks what decides whether the shim loads into a stranger's process: on an old libc,
// in a program that has used up its static TLS, beside other libraries that carry the same symbols.
func TestShimELF(t *testing.T) {
	for _, lib := range []struct {
		file, soname, prefix string
		least                int
	}{
		{"shim/libcuda.so.1", "libcuda.so.1", "cu", 600},
		{"shim/libnvidia-ml.so.1", "libnvidia-ml.so.1", "nvml", 200},
	} {
		t.Run(lib.soname, func(t *testing.T) {
			f, err := elf.Open(built(lib.file))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			for _, finding := range elfFindings(t, f, lib.soname, lib.prefix, lib.least) {
				t.Error(finding)
			}
		})
	}
}

// TestELFRulesBite holds the same rules against the worker's binary: rules that find nothing wrong
// in a Go program with cgo check nothing.
func TestELFRulesBite(t *testing.T) {
	f, err := elf.Open(built("bin/sluice-worker"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	found := strings.Join(elfFindings(t, f, "libcuda.so.1", "cu", 600), "\n")
	for _, want := range []string{"soname", "exports", "GLIBC_2."} {
		if !strings.Contains(found, want) {
			t.Errorf("the rules do not notice %s in %s", want, found)
		}
	}
}

func elfFindings(t *testing.T, f *elf.File, soname, prefix string, least int) (bad []string) {
	t.Helper()
	say := func(format string, a ...any) { bad = append(bad, fmt.Sprintf(format, a...)) }

	if names, err := f.DynString(elf.DT_SONAME); err != nil || len(names) != 1 || names[0] != soname {
		say("soname is %q, not %s", names, soname)
	}
	needed, err := f.DynString(elf.DT_NEEDED)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range needed {
		if !slices.Contains(allowedNeeded, n) {
			say("needs %s, which not every system has", n)
		}
	}
	imports, err := f.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range imports {
		v, ok := strings.CutPrefix(s.Version, "GLIBC_2.")
		if !ok {
			continue
		}
		minor, _, _ := strings.Cut(v, ".")
		if n, err := strconv.Atoi(minor); err != nil || n > newestGlibc {
			say("imports %s of %s; nothing newer than GLIBC_2.%d may be needed", s.Name, s.Version, newestGlibc)
		}
	}
	for _, tag := range []struct {
		tag  elf.DynTag
		name string
	}{
		{36, "DT_RELR: glibc before 2.36 crashes on it"},
		{elf.DT_VERDEF, "version definitions: the real library has none"},
		{elf.DT_RPATH, "DT_RPATH"}, {elf.DT_RUNPATH, "DT_RUNPATH"}, {elf.DT_TEXTREL, "DT_TEXTREL"},
	} {
		if v, err := f.DynValue(tag.tag); err == nil && len(v) > 0 {
			say("has %s", tag.name)
		}
	}
	if v, err := f.DynValue(elf.DT_FLAGS); err == nil && len(v) > 0 && elf.DynFlag(v[0])&elf.DF_STATIC_TLS != 0 {
		say("DF_STATIC_TLS: dlopen fails when the reserve is used up")
	}
	var now bool
	if v, err := f.DynValue(elf.DT_FLAGS); err == nil && len(v) > 0 && elf.DynFlag(v[0])&elf.DF_BIND_NOW != 0 {
		now = true
	}
	relro := false
	for _, p := range f.Progs {
		switch p.Type {
		case elf.PT_TLS:
			if p.Memsz > largestTLS {
				say("%d bytes of TLS; at most %d", p.Memsz, largestTLS)
			}
		case elf.PT_GNU_RELRO:
			relro = true
		case elf.PT_GNU_STACK:
			if p.Flags&elf.PF_X != 0 {
				say("asks for an executable stack")
			}
		}
	}
	if !relro || !now {
		say("relro %v, bind now %v; both are due", relro, now)
	}
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	exports := 0
	for _, s := range symbols {
		if s.Section == elf.SHN_UNDEF || elf.ST_BIND(s.Info) == elf.STB_LOCAL {
			continue
		}
		if !strings.HasPrefix(s.Name, prefix) {
			say("exports %s", s.Name)
		}
		exports++
	}
	if exports < least {
		say("exports %d symbols, fewer than %d", exports, least)
	}
	return bad
}
