package config

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Size is a number of bytes, written as 512M or 20G (powers of 1024).
type Size = form.Bytes

// HostMemory is a limit of a session's host memory in bytes, 0 for none, or ByLease.
type HostMemory uint64

// ByLease has the limit follow from what the lease grants. It is written "lease".
const ByLease HostMemory = math.MaxUint64

func (m HostMemory) String() string {
	if m == ByLease {
		return "lease"
	}
	return Size(m).String()
}

// set puts what the file (string, bool, int, list) or the environment (string)
// says into a field.
func set(f reflect.Value, oneof string, v any) error {
	switch v.(type) {
	case map[string]any, nil:
		return fmt.Errorf("wants a value")
	case []any:
		if f.Kind() != reflect.Slice {
			return fmt.Errorf("wants one value, not a list")
		}
	}
	text := fmt.Sprint(v)
	switch f.Interface().(type) {
	case Size, HostMemory:
		n, err := form.ParseBytes(text)
		if _, ok := f.Interface().(HostMemory); ok && text == ByLease.String() {
			n, err = Size(ByLease), nil
		}
		if err != nil {
			return err
		}
		f.SetUint(uint64(n))
		return nil
	case time.Duration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%q is not a time; write it as 500ms, 15s, 5m or 1h", text)
		}
		f.SetInt(int64(d))
		return nil
	}
	switch f.Kind() {
	case reflect.String:
		if b, ok := v.(bool); ok && oneof != "" { // yes and no are also booleans
			text = map[bool]string{true: "yes", false: "no"}[b]
		}
		if oneof != "" && !slices.Contains(strings.Split(oneof, "|"), text) {
			return fmt.Errorf("%q is not known; give one of %s", text, strings.ReplaceAll(oneof, "|", ", "))
		}
		f.SetString(text)
	case reflect.Bool:
		switch strings.ToLower(text) {
		case "true", "yes", "1":
			f.SetBool(true)
		case "false", "no", "0":
			f.SetBool(false)
		default:
			return fmt.Errorf("%q is neither true nor false", text)
		}
	case reflect.Int:
		n, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("%q is no whole number", text)
		}
		f.SetInt(int64(n))
	case reflect.Slice:
		var out []string
		switch l := v.(type) {
		case []any:
			for _, e := range l {
				out = append(out, fmt.Sprint(e))
			}
		default:
			out = strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
		}
		f.Set(reflect.ValueOf(out))
	default:
		panic("config: a field of kind " + f.Kind().String())
	}
	return nil
}
