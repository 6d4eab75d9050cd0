package options

import (
	"bytes"
	"fmt"
	"strings"
)

// The files that are generated, by their paths from the project's root.
const (
	Header = "spank/options.h"
	Guide  = "docs/user.md"
)

// The marks in Guide between which the table stands.
const (
	guideBegin = "<!-- generated from spank/options: begin -->\n"
	guideEnd   = "<!-- generated from spank/options: end -->\n"
)

// C is the plug-in's header.
func C() []byte {
	var b bytes.Buffer
	b.WriteString("/* Generated from spank/options/options.go by go run ./spank/cmd/spankgen; do not edit. */\n#ifndef SLUICE_SPANK_OPTIONS_H\n#define SLUICE_SPANK_OPTIONS_H\n\n")
	fmt.Fprintf(&b, "#define WISHES %d\n#define WISH_MIN_MIB %dull\n#define WISH_MAX_MIB %dull\n#define WISH_NAME_MAX %d\n\n", len(Table), MinMiB, MaxMiB, NameMax)
	b.WriteString("enum wish_kind { WISH_SIZE, WISH_CHOICE, WISH_NAME, WISH_FLAG };\n\n")
	b.WriteString("struct wish {\n\tconst char *name, *arg, *env, *help, *want;\n\tenum wish_kind kind;\n\tconst char *choices[8];\n};\n\n")
	b.WriteString("static const struct wish wishes[WISHES] = {\n")
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
		fmt.Fprintf(&b, "\t{ %s, %s, %s, %s,\n\t  %s,\n\t  WISH_%s, { %s } },\n", quote(o.Name), arg, quote(o.Env), quote(o.Help), quote(o.Want()),
			strings.ToUpper(string(o.Kind)), strings.Join(append(choices, "NULL"), ", "))
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

// Into puts the table between the marks of a guide; a guide without them stays as
// it is.
func Into(guide []byte) []byte {
	before, rest, ok := bytes.Cut(guide, []byte(guideBegin))
	if !ok {
		return guide
	}
	_, after, ok := bytes.Cut(rest, []byte(guideEnd))
	if !ok {
		return guide
	}
	return bytes.Join([][]byte{before, []byte(guideBegin), []byte(Markdown()), []byte(guideEnd), after}, nil)
}
