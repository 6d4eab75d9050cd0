package options

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/sluice-hpc/sluice/internal/form"
)

// The files that are generated, by their paths from the project's root.
const (
	Header = "spank/options.h"
	Guide  = "docs/user.md"
	Script = "prolog/sluice.lua"
)

// The marks between which the generated part of Guide and Script stands.
const (
	begin = "generated from spank/options: begin"
	end   = "generated from spank/options: end"
)

// Generated are the files that have something generated in them, by name, as they ought to
// be. read gives them as they are.
func Generated(read func(name string) ([]byte, error)) (map[string][]byte, error) {
	out := map[string][]byte{Header: C()}
	for name, text := range map[string]string{Guide: Markdown(), Script: Lua()} {
		have, err := read(name)
		if err != nil {
			return nil, err
		}
		if out[name], err = into(have, text); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return out, nil
}

// C is the plug-in's header.
func C() []byte {
	var b bytes.Buffer
	b.WriteString("/* Generated from spank/options/options.go by go run ./spank/cmd/spankgen; do not edit. */\n#ifndef SLUICE_SPANK_OPTIONS_H\n#define SLUICE_SPANK_OPTIONS_H\n\n#include <stdbool.h>\n\n")
	fmt.Fprintf(&b, "#define SL_GRES %q /* and how the names of all our licences begin */\n#define SL_GPUS_MAX %d /* of one lease */\n#define SL_OPTIONS %d\n#define SL_OPTION_MIN_MIB %dull\n#define SL_OPTION_MAX_MIB %dull\n#define SL_OPTION_MAX_SECONDS %du\n#define SL_OPTION_NAME_MAX %d\n#define SL_TEXT_MAX %d /* bytes of an error in an answer on the job socket */\n#define SL_BODY_MAX %d /* bytes of the changes in one */\n\n", form.Gres, form.MaxDevices, len(Table), MinMiB, MaxMiB, MaxSeconds, form.MaxPlainName, TextMax, BodyMax)
	b.WriteString("enum sl_option_kind { SL_OPTION_SIZE, SL_OPTION_CHOICE, SL_OPTION_NAME, SL_OPTION_TIME, SL_OPTION_FLAG };\n\n")
	b.WriteString("enum {")
	for i := range Table {
		fmt.Fprintf(&b, " SL_%s,", Table[i].Env)
	}
	b.WriteString(" }; /* places in the table */\n\n")
	b.WriteString("struct sl_option {\n\tconst char *name, *arg, *env, *help, *want;\n\tenum sl_option_kind kind;\n\tbool step; /* may be given to a step */\n\tconst char *choices[8];\n};\n\n")
	b.WriteString("static const struct sl_option sl_options[SL_OPTIONS] = {\n")
	for i := range Table {
		o := &Table[i]
		arg := "NULL"
		if o.Arg != "" {
			arg = quote(o.Arg)
		}
		choices := make([]string, 0, len(o.Choices)+1)
		for _, c := range o.Choices {
			choices = append(choices, quote(c))
		}
		fmt.Fprintf(&b, "\t{ %s, %s, %s, %s,\n\t  %s,\n\t  SL_OPTION_%s, %t, { %s } },\n", quote(o.Name), arg, quote(o.Env), quote(o.Help), quote(o.Want()),
			strings.ToUpper(string(o.Kind)), o.Step, strings.Join(append(choices, "NULL"), ", "))
	}
	b.WriteString("};\n\n#endif\n")
	return b.Bytes()
}

func quote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}

// Markdown is the table of the user's guide.
func Markdown() string {
	var b strings.Builder
	b.WriteString("| option | meaning |\n|---|---|\n")
	for i := range Table {
		o := &Table[i]
		name, help := "--"+o.Name, o.Help
		if o.Arg != "" {
			name += "=" + o.Arg
		}
		if o.More != "" {
			help += "; " + o.More
		}
		fmt.Fprintf(&b, "| `%s` | %s |\n", name, help)
	}
	return b.String()
}

// Lua is what job_submit's script knows of the options and of what one lease has at most.
func Lua() string {
	var b strings.Builder
	fmt.Fprintf(&b, "local GRES = %q          -- the gres, and how the names of all of our licences begin\n", form.Gres)
	fmt.Fprintf(&b, "local MAX_FRACTIONS = %d     -- of one lease, that is of one job on one node\n", form.MaxDevices)
	fmt.Fprintf(&b, "local MIN_MIB, MAX_MIB = %d, %d\nlocal MAX_SECONDS = %d\n", MinMiB, MaxMiB, MaxSeconds)
	b.WriteString("-- The plug-in's options: what their values are, and how that is said.\nlocal OPTIONS = {\n")
	for i := range Table {
		o := &Table[i]
		fmt.Fprintf(&b, "  { name = %q, key = %q, kind = %q, want = %q", o.Name, strings.TrimPrefix(o.Env, "RGPU_"), o.Kind, o.Want())
		if len(o.Choices) > 0 {
			b.WriteString(",\n    choices = {")
			for j, c := range o.Choices {
				if j > 0 {
					b.WriteString(",")
				}
				fmt.Fprintf(&b, " [%q] = true", c)
			}
			b.WriteString(" }")
		}
		b.WriteString(" },\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// into puts text between the lines of a file that have the marks.
func into(file []byte, text string) ([]byte, error) {
	before, rest, ok := strings.Cut(string(file), begin)
	close, rest, ok2 := strings.Cut(rest, "\n")
	_, after, ok3 := strings.Cut(rest, end)
	if !ok || !ok2 || !ok3 {
		return nil, fmt.Errorf("no lines with %q and %q", begin, end)
	}
	// What opens a comment before the second mark opens it before the first, too.
	open := before[strings.LastIndexByte(before, '\n')+1:]
	return []byte(before + begin + close + "\n" + text + open + end + after), nil
}
