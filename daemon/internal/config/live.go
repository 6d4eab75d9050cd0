package config

import "reflect"

// Live is old with those values of now that can change while the daemon runs: the
// keys marked live, the pools, the partitions and the quotas.
func Live(old, now *Config) *Config {
	out := *old
	from, to := reflect.ValueOf(now).Elem(), reflect.ValueOf(&out).Elem()
	for _, k := range Keys() {
		if k.Live {
			to.FieldByIndex(k.index).Set(from.FieldByIndex(k.index))
		}
	}
	out.Pools, out.Partitions, out.Quotas = now.Pools, now.Partitions, now.Quotas
	return &out
}
