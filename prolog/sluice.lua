-- Sluice in slurmctld: what a job asks for by --gres=rgpu becomes licences, which are
-- what Slurm queues, limits and accounts the pool of GPUs by. One unit of a licence
-- is one percent of a GPU.
--
-- job_submit.lua calls apply and modify; both give the number that Slurm wants. A job
-- that does not ask is left alone, whatever state Sluice is in. Written for Lua 5.1 to
-- 5.4: Slurm's builds differ in it, and in 5.1 all numbers are floating point.
--
-- What a user may choose is never trusted here for more than a charge: the daemon
-- gives a job only what its licences pay for.

local M = {}

-- generated from spank/options: begin
local GRES = "rgpu"          -- the gres, and how the names of all of our licences begin
local MAX_FRACTIONS = 16     -- of one lease, that is of one job on one node
local MIN_MIB, MAX_MIB = 2, 16777216
local MAX_SECONDS = 86400
-- The plug-in's options: what their values are, and how that is said.
local OPTIONS = {
  { name = "rgpu-mem", key = "MEM", kind = "size", want = "a whole number with M, G or T behind it (powers of 1024) from 2M to 16T, as 20G" },
  { name = "rgpu-policy", key = "POLICY", kind = "choice", want = "one of best-effort, equal, equal-lend, fixed, fixed-lend",
    choices = { ["best-effort"] = true, ["equal"] = true, ["equal-lend"] = true, ["fixed"] = true, ["fixed-lend"] = true } },
  { name = "rgpu-pool", key = "POOL", kind = "name", want = "a pool's name: letters, digits, '.', '-' and '_', at most 63, the first a letter or a digit" },
  { name = "rgpu-grace", key = "GRACE", kind = "time", want = "0, or a whole number with s, m or h behind it up to 24h, as 30m" },
  { name = "rgpu-bind", key = "BIND", kind = "choice", want = "one of all, task",
    choices = { ["all"] = true, ["task"] = true } },
  { name = "rgpu-spread", key = "SPREAD", kind = "flag", want = "no value" },
  { name = "rgpu-report", key = "REPORT", kind = "flag", want = "no value" },
}
-- generated from spank/options: end

-- slurmctld waits for all of this, and does not look at how long a string is before: what
-- is longer it refuses afterwards. No pattern here may take more than linear time.
local MAX_TEXT, MAX_ENV = 128 * 1024, 4096
local NO_VAL, INFINITE = 4294967294, 4294967295

-- Where `sluice slurm lua` writes what the pools have. Read at every job that asks, so
-- that a new table needs no restart; the last good one is kept.
local path, site = "/etc/slurm/sluice_pools.lua", nil

function M.table(file) path, site = file, nil end

-- A refusal travels as an error with a table, so that the rest reads straight down.
local function refuse(fmt, ...) error({ refusal = string.format(fmt, ...) }, 0) end

-- What users wrote is shown short and clean.
local function show(s)
  s = tostring(s):gsub("[^ -~]", "?")
  return #s > 60 and s:sub(1, 57) .. "..." or s
end

local function number(v)
  if type(v) ~= "number" or v == NO_VAL or v == INFINITE or v <= 0 then return nil end
  return v
end

-- given is a field's string, "" too; nil where a release has no such field, or it is
-- not set.
local function given(t, field)
  local ok, v = pcall(function() return t[field] end)
  if ok and type(v) == "string" then
    if #v > MAX_TEXT then refuse("%s has %d bytes: that is too long", field, #v) end
    return v
  end
end

local function text(t, field)
  local v = given(t, field)
  if v ~= "" and v ~= "(null)" then return v end
end

local function numeric(t, field)
  local ok, v = pcall(function() return t[field] end)
  return ok and number(v) or nil
end

local function keys(t)
  local out = {}
  for k in pairs(t) do out[#out + 1] = k end
  table.sort(out)
  return #out > 0 and table.concat(out, ", ") or "none"
end

local function each(list, separators)
  return string.gmatch(list or "", "[^" .. separators .. "]+")
end

-- The site's table.

local function load_site()
  local chunk, why = loadfile(path)
  local ok, t
  if chunk then
    ok, t = pcall(chunk)
    if ok and type(t) == "table" and t.version == 1 and type(t.pools) == "table" and type(t.partitions) == "table" then
      site = t
      return t
    end
    why = ok and "it is no table of this version" or tostring(t)
  end
  slurm.log_error("sluice: %s: %s; %s", path, show(why), site and "the one read before is used" or "write it by: sluice slurm lua --out " .. path)
  if site then return site end
  refuse("this cluster has no table of its GPU pools yet; tell the administrator to run: sluice slurm lua --out %s", path)
end

-- What a job asks for.

-- entry reads one item of a list of resources: its type and count if it is ours.
-- 22.05 writes gres:rgpu:50, later releases gres/rgpu:50, a user rgpu:50 or rgpu=50.
local function entry(item)
  local s = item:gsub("^%s+", ""):reverse():gsub("^%s+", ""):reverse()
  local name, rest = s:gsub("^gres[:/]", ""):match("^([^:=/%s]+)(.*)$")
  if name ~= GRES then return nil end
  if rest == "" then return "", nil end
  local kind, count = rest:match("^[:=]([^:=]+):([^:=]*)$")
  if not kind then kind, count = "", rest:match("^[:=]([^:=]*)$") end
  if count and kind == "" and count:match("^%a") then kind, count = count, nil end
  if kind ~= "" and not kind:match("^%a[%w_.-]*$") or kind == "" and not count then kind, count = "", "?" end
  return kind, count
end

local SUFFIX = { k = 1024, m = 1024 ^ 2, g = 1024 ^ 3, t = 1024 ^ 4, p = 1024 ^ 5 }

-- percents is a count as Slurm reads it, nil if it is none.
local function percents(s)
  local digits, suffix = s:match("^(%d+)(%a?)$")
  if not digits then return nil end
  digits = digits:gsub("^0+(%d)", "%1")
  if #digits > 12 then return math.huge end
  suffix = suffix:lower()
  if suffix ~= "" and not SUFFIX[suffix] then return nil end
  return tonumber(digits) * (SUFFIX[suffix] or 1)
end

-- ours is the items of a list that are about the pool, by gres or by licence. What separates
-- items is the list of form.HasLicence.
local function ours(list)
  local found = {}
  for item in each(list, ",;|()%[%]%s") do
    local s = item:gsub("^gres[:/]", ""):gsub("^licenses?[:/]", "")
    if s:sub(1, #GRES) == GRES then found[#found + 1] = item end
  end
  return found
end

-- request is the type and percent for each node, nil for a job that does not ask.
local function request(job)
  for field, option in pairs({ tres_per_job = "a count for the whole job", tres_per_task = "--tres-per-task",
                               tres_per_socket = "a count for each socket" }) do
    local list = text(job, field)
    local item = list and ours(list)[1]
    if item then refuse("%s (%s): a fraction is for a node; ask by --gres=rgpu:PERCENT", show(item), option) end
  end
  local kind, count, item
  for one in each(text(job, "tres_per_node") or text(job, "gres"), ",") do
    local k, c = entry(one)
    if k then
      if item then refuse("--gres has %s and %s; ask for rgpu once, of one type", show(item), show(one)) end
      kind, count, item = k, c, one
    end
  end
  if item then return kind, count, (item:gsub("^%s*gres[:/]", "")) end
end

-- options reads the plug-in's options, as the job's record carries them.
local function options(job)
  local out = {}
  local size = numeric(job, "spank_job_env_size") or 0
  local env = size > 0 and job.spank_job_env or {}
  for i = 0, math.min(size, MAX_ENV) - 1 do
    local name, value = tostring(env[i] or ""):match("^RGPU_(%u+)=(.*)$")
    if name then
      if out[name] and out[name] ~= value then refuse("--rgpu-%s is there twice", name:lower()) end
      out[name] = value
    end
  end
  return out
end

-- mebibytes reads 20G, nil if it is no size or out of range.
local function mebibytes(s)
  local digits, suffix, rest = s:match("^(%d+)([mMgGtT])([iI]?[bB]?)$")
  if not digits or rest:lower() == "i" then return nil end -- 20G, 20GB and 20GiB are the same
  digits = digits:gsub("^0+(%d)", "%1")
  if #digits > 12 then return nil end
  local n = tonumber(digits) * ({ m = 1, g = 1024, t = 1024 * 1024 })[suffix:lower()]
  return n >= MIN_MIB and n <= MAX_MIB and n or nil
end

-- seconds reads 30m, nil if it is not a time or out of range.
local function seconds(s)
  if s == "0" then return 0 end
  local digits, unit = s:match("^(%d+)([smh])$")
  if not digits or #digits > 5 then return nil end
  local n = tonumber(digits) * ({ s = 1, m = 60, h = 3600 })[unit]
  return n <= MAX_SECONDS and n or nil
end

-- partition is what the site says of a job's partitions, which must agree in it: the
-- job is charged before Slurm chooses one.
local function partition(t, list, parts)
  if not list then
    for name, p in pairs(parts or {}) do
      if p.flag_default == 1 then list = name end
    end
  end
  local pool, mem, first
  for name in each(list, ",") do
    local p = t.partitions[name] or {}
    local its = p.pool or "default"
    if first and (its ~= pool or p.mem ~= mem) then
      refuse("partitions %s and %s have other GPU pools or memory; name one partition", show(first), show(name))
    end
    first, pool, mem = name, its, p.mem
  end
  return pool or "default", mem
end

-- nodes is how many nodes the job will have: one number, since each is charged. Without
-- one the job gets as many as its tasks say, and else one.
local function nodes(job, notes)
  local min, max = numeric(job, "min_nodes"), numeric(job, "max_nodes")
  if min and max and min ~= max or max and not min and max > 1 then
    refuse("--nodes=%d-%d: each node is charged, so say one number", min or 1, max)
  end
  local n = max or min
  if not n then
    local tasks, per = numeric(job, "num_tasks") or 1, numeric(job, "ntasks_per_node")
    if per == 65534 then per = nil end -- not set, in its 16 bits
    n = per and math.ceil(tasks / per) or 1
    if tasks > 1 and not per then
      notes[#notes + 1] = string.format("%d tasks on 1 node, since --nodes is not given", tasks)
    end
  end
  local dep = text(job, "dependency")
  if dep and dep:match("expand:") then refuse("--dependency=expand: a job with a fraction cannot grow") end
  return n
end

-- charge is the units that a request of percent costs on one node, each fraction paying
-- for the larger of its shares of compute and memory. The daemon checks by form.Units; both
-- are tested against internal/form/testdata/charges.txt.
local function charge(percent, mem, gpu_mem)
  local whole, rest = math.floor(percent / 100), percent % 100
  if mem and gpu_mem and rest > 0 then rest = math.max(rest, math.ceil(100 * mem / gpu_mem)) end
  return whole * 100 + rest
end

local function pool_of(t, opts, standard)
  local name = opts.POOL or standard
  local pool = t.pools[name]
  if not pool then refuse("--rgpu-pool=%s: no such pool; there are: %s", show(name), keys(t.pools)) end
  return name, pool
end

local function type_of(t, name, pool, kind)
  if kind == "" then return pool end
  local typ = (pool.types or {})[kind]
  if typ then return typ end
  for other, p in pairs(t.pools) do
    if (p.types or {})[kind] then refuse("--gres=rgpu:%s: that type is in pool %s; add --rgpu-pool=%s", kind, other, other) end
  end
  if not next(pool.types or {}) then
    refuse("--gres=rgpu:%s: the GPUs of pool %s have no types; ask without one, as --gres=rgpu:50", show(kind), name)
  end
  refuse("--gres=rgpu:%s: pool %s has no such type; it has: %s", show(kind), name, keys(pool.types))
end

local function check_options(opts)
  for _, o in ipairs(OPTIONS) do
    local v = opts[o.key]
    local bad = v and (o.kind == "size" and not mebibytes(v) or o.kind == "time" and not seconds(v)
      or o.kind == "choice" and not o.choices[v] or o.kind == "flag" and v ~= "1")
    if bad then refuse("--%s=%s: want %s", o.name, show(v), o.want) end
  end
end

-- fraction checks a request against what its pool has and gives the licences of one node.
local function fraction(t, opts, standard, kind, count, item)
  local name, pool = pool_of(t, opts, standard.pool)
  local of = type_of(t, name, pool, kind)
  local most = math.min(of.gpus, MAX_FRACTIONS) * 100
  local range = string.format("give 1 to %d percent of a GPU, as --gres=rgpu:%s50", most, kind ~= "" and kind .. ":" or "")
  if not count then refuse("--gres=%s does not say how much: %s", show(item), range) end
  local percent = percents(count)
  if not percent then refuse("--gres=%s: not a whole number of percent; %s", show(item), range) end
  if percent < 1 or percent > most then refuse("--gres=%s: %s", show(item), range) end

  local mem = standard.mem
  if opts.MEM then mem = mebibytes(opts.MEM) end
  local least = math.max(of.least or 0, MIN_MIB)
  if mem and of.mem and mem > of.mem then
    refuse("%s of %d MiB: give --rgpu-mem of %dM to %dM, the memory of the smallest GPU of pool %s",
      opts.MEM and "--rgpu-mem" or "the partition's memory", mem, least, of.mem, name)
  end
  -- No GPU of the pool can ever hold such a fraction: the job would wait, and fail at its start.
  if mem and mem < least then
    refuse("%s of %d MiB: give --rgpu-mem of %dM or more, which a program's context needs on the GPUs of pool %s",
      opts.MEM and "--rgpu-mem" or "the partition's memory", mem, least, name)
  end
  local part, enough = percent % 100, of.least_percent or 0
  if not mem and part > 0 and part < enough then
    refuse("--gres=%s: %d percent has less memory than a program's context needs on the GPUs of pool %s; give %d percent or more, or --rgpu-mem of %dM or more",
      show(item), part, name, enough, least)
  end
  local units = charge(percent, mem, of.mem)
  return { name = name, pool = pool, of = of, percent = percent, units = units, mem = mem }
end

-- Releases that write gres/ let only the first component have licences.
local function new_release(job)
  return (text(job, "tres_per_node") or ""):find("gres/", 1, true) ~= nil
end

local function submit(job, parts)
  local taken = ours(text(job, "licenses"))[1]
  if taken then refuse("--licenses=%s is charged from --gres=rgpu:PERCENT; leave it out", show(taken)) end
  local kind, count, item = request(job)
  local opts = options(job)
  if not kind then
    -- No refusal: an sbatch inside of a job has inherited that job's options.
    local name = opts.MEM and "mem" or opts.POOL and "pool" or opts.POLICY and "policy"
    return name and { string.format("--rgpu-%s asks for nothing without --gres=rgpu:PERCENT", name) }
  end
  local t = load_site()
  local notes, standard = {}, {}
  check_options(opts)
  standard.pool, standard.mem = partition(t, text(job, "partition"), parts)
  local f = fraction(t, opts, standard, kind, count, item)
  local n = nodes(job, notes)
  local units, total = f.units * n, f.of.gpus * 100
  if units > total then
    refuse("--gres=%s on %d nodes takes %d units and pool %s has %d; give at most %d percent, or fewer nodes",
      show(item), n, units, f.name, total, math.floor(total / n))
  end
  local with = text(job, "licenses")
  if with and with:find("|", 1, true) then refuse("--licenses=%s: a choice of licences does not go with --gres=rgpu", show(with)) end
  if numeric(job, "het_job_offset") and new_release(job) then
    notes[#notes + 1] = "where Slurm refuses licences here, ask in the first component of a heterogeneous job only"
  end
  local list = {}
  for l in each(with, ",;") do list[#list + 1] = l end
  list[#list + 1] = string.format("%s:%d", f.pool.licence, units)
  if f.of.licence and f.of ~= f.pool then list[#list + 1] = string.format("%s:%d", f.of.licence, units) end
  if f.units > f.percent then
    notes[#notes + 1] = string.format("%d MiB of a GPU's %d cost %d units for each node, not %d", f.mem, f.of.mem, f.units, f.percent)
  end
  job.licenses = table.concat(list, ",")
  job.min_nodes, job.max_nodes = n, n
  return notes
end

local function change(job, record, parts)
  local has = #ours(text(record, "licenses")) > 0 or #ours(text(record, "tres_per_node")) > 0
  local asks = #ours(text(job, "licenses")) > 0
  for _, field in ipairs({ "tres_per_node", "tres_per_job", "tres_per_task", "tres_per_socket" }) do
    local v = given(job, field)
    if v and (has or #ours(v) > 0) then asks = true end
  end
  if asks or has and given(job, "licenses") then
    refuse("what a job takes of the GPU pool cannot be changed; cancel it and submit it again")
  end
  if not has then return end
  for _, field in ipairs({ "min_nodes", "max_nodes" }) do
    local v = numeric(job, field)
    if v and v ~= numeric(record, field) then refuse("a job with a fraction is charged for each node: cancel it and submit it again with another --nodes") end
  end
  local dep = text(job, "dependency")
  if dep and dep:match("expand:") then refuse("a job with a fraction cannot grow") end
  local to = text(job, "partition")
  if to then
    local t = load_site()
    local pool, mem = partition(t, to, parts)
    local pool0, mem0 = partition(t, text(record, "partition"), parts)
    if pool ~= pool0 or mem ~= mem0 then
      refuse("partition %s has another GPU pool or memory than %s: cancel the job and submit it there", show(to), show(text(record, "partition")))
    end
  end
end

-- guard runs f; a refusal and a fault both refuse the job, each in its own words, with
-- the code that Slurm's commands have a text for.
local function guard(code, f, ...)
  local ok, out = pcall(f, ...)
  if ok then
    for _, note in ipairs(out or {}) do slurm.log_user("%s", "sluice: " .. note) end
    return slurm.SUCCESS
  end
  if type(out) == "table" and out.refusal then
    slurm.log_user("%s", "sluice: " .. out.refusal)
    slurm.log_info("%s", "sluice: refused: " .. out.refusal) -- scontrol update does not show the other
  else
    slurm.log_error("%s", "sluice: " .. tostring(out))
    slurm.log_user("%s", "sluice: this request cannot be read; slurmctld's log says why")
  end
  return code or slurm.ERROR
end

-- apply charges a job that is submitted; for slurm_job_submit.
function M.apply(job, parts, uid) return guard(slurm.ERROR, submit, job, parts, uid) end

-- modify keeps what was charged from being changed, except by root; for slurm_job_modify.
function M.modify(job, record, parts, uid)
  if uid == 0 then return slurm.SUCCESS end
  return guard(slurm.ESLURM_ACCESS_DENIED, change, job, record, parts, uid)
end

return M
