// The tables: how the runs ended, their held-out rates with intervals, and their settings.
function makeSummary() {
  const rows = data.runs.map((run, number) => element('tr', {},
    element('th', {scope: 'row'}, swatch(number), ` ${run.name}`),
    element('td', {class: run.status === 'failed' ? 'status-failed' : null}, run.status),
    element('td', {}, run.algorithm ?? run.command),
    element('td', {class: 'number'}, run.asked && run.asked !== run.steps ? `${run.steps} of ${run.asked}` : `${run.steps}`),
    element('td', {class: 'number'}, duration(run.seconds)),
    element('td', {class: 'long'}, run.model ?? 'a small model that was made'),
    element('td', {class: 'long small'}, describeLosses(run)),
    element('td', {class: 'small soft'}, Object.entries(run.versions).map((pair) => pair.join(' ')).join(', '))));
  const head = ['run', 'status', 'algorithm', 'steps', 'time', 'model', 'lost and cut', 'versions'];
  return section('runs', 'Runs', element('div', {class: 'scroll'}, element('table', {}, element('thead', {},
    element('tr', {}, head.map((name) => element('th', {scope: 'col'}, name)))), element('tbody', {}, rows))));
}

function describeLosses(run) {
  const {failed, dropped_groups: groups} = run.lost, {answers_cut: answers, cut_to_max_seq_len: cut, trained} = run.samples;
  const said = [];
  if (run.failed) said.push(run.failed);
  if (failed) said.push(`${format(failed)} episodes failed, ${format(groups)} groups dropped`);
  if (answers) said.push(`${format(answers)} of ${format(trained)} answers cut off`);
  if (cut) said.push(`${format(cut)} samples cut to max_seq_len`);
  return said.join('; ');
}

/** Rates that both a run's start and end have, or its end: a row for each, with a picture. */
function makeHeldOut() {
  const box = element('div', {class: 'scroll'});
  const draw = () => {
    const names = new Set([...shown].flatMap((run) => [...Object.keys(data.runs[run].before), ...Object.keys(data.runs[run].after)]));
    const rows = [...names].flatMap((name) => makeRate(name));
    box.replaceChildren(rows.length ? element('table', {}, element('thead', {}, element('tr', {},
      ['rate', 'run', 'before', 'after', '95 % interval after', ''].map((name) => element('th', {scope: 'col'}, name)))),
    element('tbody', {}, rows)) : element('p', {class: 'soft'}, 'Nothing was measured on held-out data.'));
  };
  whenShown(draw);
  draw();
  const counts = data.runs.filter((run) => run.heldout.problems).map((run) => `${run.name}: ${run.heldout.problems} problems, ${format(run.heldout.answers)} sampled answers`);
  return section('heldout', 'Held-out rates', element('p', {class: 'soft small'}, 'Hollow: before training; filled: after. Lines are 95 % intervals over problems. ', counts.join('; ')), box);
}

function makeRate(name) {
  const runs = [...shown].sort((a, b) => a - b).filter((run) => name in data.runs[run].before || name in data.runs[run].after);
  const points = runs.flatMap((run) => ['before', 'after'].flatMap((when) => [data.runs[run][when][name], ...(findInterval(run, when, name) ?? [])]));
  const known = points.filter((value) => value !== undefined && value !== null);
  const [low, high] = known.every((value) => value >= 0 && value <= 1) ? [0, 1] : limits(known);
  return runs.map((run, place) => {
    const {before, after} = data.runs[run], interval = findInterval(run, 'after', name);
    return element('tr', {}, place ? null : element('th', {scope: 'rowgroup', rowspan: runs.length}, name),
      element('td', {}, swatch(run), ` ${data.runs[run].name}`),
      element('td', {class: 'number'}, format(before[name])), element('td', {class: 'number'}, format(after[name])),
      element('td', {class: 'number small'}, interval ? `${format(interval[0])} to ${format(interval[1])}` : ''),
      element('td', {}, drawRate(run, name, low, high)));
  });
}

function findInterval(run, when, name) {
  const found = data.runs[run].intervals[when]?.[name];
  return found && found[0] !== null && found[1] !== null ? found : null;
}

function drawRate(run, name, low, high) {
  const x = (value) => 6 + ((value - low) / ((high - low) || 1)) * 248;
  const svg = drawn('svg', {viewBox: '0 0 260 22', width: 260, 'aria-hidden': 'true'}, drawn('line', {class: 'grid', x1: 6, x2: 254, y1: 11, y2: 11}));
  [['before', 7], ['after', 15]].forEach(([when, y]) => {
    const value = data.runs[run][when][name], interval = findInterval(run, when, name);
    if (value === undefined || value === null) return;
    if (interval) svg.append(drawn('line', {x1: x(interval[0]), x2: x(interval[1]), y1: y, y2: y, stroke: colour(run), 'stroke-width': 2}));
    svg.append(drawn('circle', {cx: x(value), cy: y, r: 3.5, stroke: colour(run), 'stroke-width': 1.5, fill: when === 'after' ? colour(run) : 'var(--paper)'}));
  });
  return svg;
}

function makeSettings() {
  const differing = new Set(data.differing);
  const only = element('input', {type: 'checkbox', checked: data.runs.length > 1 && differing.size > 0, change: () => draw()});
  const search = element('input', {type: 'search', placeholder: 'trainer.lr', 'aria-label': 'search in settings', input: () => draw()});
  const box = element('div', {class: 'scroll'});
  const draw = () => {
    const names = Object.keys(data.settings).filter((name) => (!only.checked || differing.has(name)) && name.includes(search.value.trim()));
    const rows = names.map((name) => element('tr', {class: differing.has(name) ? 'differs' : null},
      element('th', {scope: 'row', class: 'mono'}, differing.has(name) ? `≠ ${name}` : name),
      data.settings[name].map((value) => element('td', {class: 'mono long'}, setting(value)))));
    box.replaceChildren(element('table', {}, element('thead', {}, element('tr', {}, element('th', {scope: 'col'}, 'setting'),
      data.runs.map((run, number) => element('th', {scope: 'col'}, swatch(number), ` ${run.name}`)))), element('tbody', {}, rows)));
  };
  draw();
  return section('settings', 'Settings', element('div', {class: 'bar'},
    data.runs.length > 1 ? element('label', {}, only, `only the ${differing.size} that differ`) : null, element('label', {}, 'search', search)), box);
}
