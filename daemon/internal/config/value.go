package config

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes, written as 512M or 20G (powers of 1024).
type Size uint64

var units = []struct {
	suffix string
	bytes  uint64
}{{"T", 1 << 40}, {"G", 1 << 30}, {"M", 1 << 20}, {"K", 1 << 10}}

func (s Size) String() string {
	for _, u := range units {
		if s != 0 && uint64(s)%u.bytes == 0 {
			return fmt.Sprintf("%d%s", uint64(s)/u.bytes, u.suffix)
		}
	}
	return strconv.FormatUint(uint64(s), 10)
}

// ParseSize reads bytes: digits and at most one of K, M, G, T, also as KiB and such.
func ParseSize(text string) (Size, error) {
	s := strings.ToUpper(strings.TrimSpace(text))
	s = strings.TrimSuffix(strings.TrimSuffix(s, "IB"), "B")
	unit := uint64(1)
	for _, u := range units {
		if strings.HasSuffix(s, u.suffix) {
			s, unit = strings.TrimSuffix(s, u.suffix), u.bytes
			break
		}
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n > math.MaxInt64/unit {
		return 0, fmt.Errorf("%q is no size; write it as 512M or 20G", text)
	}
	return Size(n * unit), nil
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
	case Size:
		n, err := ParseSize(text)
		if err != nil {
			return err
		}
		f.SetUint(uint64(n))
		return nil
	case time.Duration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%q is no time; write it as 500ms, 15s, 5m or 1h", text)
		}
		f.SetInt(int64(d))
		return nil
	}
	switch f.Kind() {
	case reflect.String:
		if b, ok := v.(bool); ok && oneof != "" { // yes and no are also booleans
			text = map[bool]string{true: "yes", false: "no"}[b]
		}
		if oneof != "" && !contains(strings.Split(oneof, "|"), text) {
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

func contains(list []string, s string) bool {
	for _, e := range list {
		if e == s {
			return true
		}
	}
	return false
}
