//go:build race

package owner

func init() { raced = true }
