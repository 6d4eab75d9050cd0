// Package version says which commit a program was built from.
package version

// Commit is the commit as git describe prints it, with "-dirty" if the tree differed from it. The Makefile sets it.
var Commit = "unknown"
