package api

import (
	_ "embed"
	"fmt"
	"strings"
)

//go:embed numbers.tbl
var numbersSource []byte

// number gives rows the operation numbers that numbers.tbl has for their functions. It returns how many numbers there are.
func number(rows []Row, src []byte) (int, error) {
	all, n := map[string]int{}, 0
	for i, line := range strings.Split(string(src), "\n") {
		s := strings.TrimSpace(line)
		if s == "" || s[0] == '#' {
			continue
		}
		symbol, gone := strings.CutPrefix(s, "- ")
		if strings.ContainsAny(symbol, " \t") {
			return 0, fmt.Errorf("%w: numbers.tbl: line %d: %q is no function", ErrTable, i+1, s)
		}
		if _, twice := all[symbol]; twice && !gone {
			return 0, fmt.Errorf("%w: numbers.tbl: line %d: %s has a number already; put \"- \" before the old one if its parameters have changed", ErrTable, i+1, symbol)
		}
		if !gone {
			all[symbol] = n
		}
		n++
	}
	for i := range rows {
		op, ok := all[rows[i].Symbol]
		if !ok {
			return 0, fmt.Errorf("%w: %s has no number: add a line %q to the end of numbers.tbl", ErrTable, rows[i].Symbol, rows[i].Symbol)
		}
		rows[i].Op = op
		delete(all, rows[i].Symbol)
	}
	for symbol := range all {
		return 0, fmt.Errorf("%w: numbers.tbl: %s is not in cuda.tbl: put \"- \" before it, so that its number is not given again", ErrTable, symbol)
	}
	return n, nil
}

// Numbers is how many operation numbers the functions of cuda.tbl have, those that are gone included.
func Numbers() (int, error) {
	rows, err := Parse(source)
	if err != nil {
		return 0, err
	}
	return number(rows, numbersSource)
}
