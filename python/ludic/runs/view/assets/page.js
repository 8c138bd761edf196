// Puts the page together.
const FIRST = ['train/avg_sampled_reward', 'eval/sampled_reward', 'eval/greedy_accuracy', 'train/entropy', 'train/avg_completion_length',
  'train/loss', 'eval/loss', 'eval/pairwise_accuracy', 'train/accuracy', 'eval/ece', 'mismatch/kl', 'train/grad_norm', 'train/lr'];
const isReward = (metric) => /^train\/rewards\/.+\/mean$/.test(metric);

function makeCurves() {
  const phases = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))];
  const counts = new Map(phases.map((phase) => [phase, data.runs.filter((run) => run.series[phase]).length]));
  const main = phases.filter((phase) => phase !== 'warm_up').sort((a, b) => counts.get(b) - counts.get(a))[0] ?? phases[0];
  const options = {phase: main, smoothing: 0, log: false};
  const charts = [], box = element('div', {class: 'charts'});
  const metrics = () => [...new Set(data.runs.flatMap((run) => Object.keys(run.series[options.phase]?.values ?? {})))].sort();
  const draw = () => charts.forEach((chart) => { chart.offer(metrics()); chart.draw(); });
  const add = (metric) => {
    const chart = new Chart(metric, options, () => { charts.splice(charts.indexOf(chart), 1); chart.node.remove(); });
    charts.push(chart);
    box.append(chart.node);
  };
  const begin = () => {
    charts.length = 0;
    box.replaceChildren();
    const known = metrics(), rewards = known.filter(isReward);
    const chosen = [...FIRST.slice(0, 3), ...(rewards.length > 1 ? rewards : []), ...FIRST.slice(3)].filter((metric) => known.includes(metric));
    (chosen.length ? chosen : known).slice(0, 8).forEach(add);
    draw();
  };
  const phase = choice('phase', phases.map((name) => [name, name]), () => { options.phase = phase.value; begin(); });
  phase.value = options.phase;
  const weight = element('output', {}, '0');
  const smoothing = element('input', {type: 'range', min: 0, max: 0.99, step: 0.01, value: 0, 'aria-label': 'smoothing',
    input: () => { options.smoothing = Number(smoothing.value); weight.textContent = smoothing.value; draw(); }});
  const log = element('input', {type: 'checkbox', change: () => { options.log = log.checked; draw(); }});
  whenShown(draw);
  begin();
  return section('curves', 'Curves', phases.length ? element('div', {class: 'bar'}, element('label', {}, 'phase', phase),
    element('label', {}, 'smoothing', smoothing, weight), element('label', {}, log, 'log axis'),
    element('button', {type: 'button', click: () => { add(metrics()[0]); draw(); }}, 'Add a chart')) : element('p', {class: 'soft'}, 'No step was logged.'), box);
}

function makeToggles() {
  const toggles = data.runs.map((run, number) => {
    const box = element('input', {type: 'checkbox', checked: true, change: () => show(number, box.checked)});
    return element('label', {title: run.path}, box, swatch(number), run.name);
  });
  return element('div', {class: 'bar runs', role: 'group', 'aria-label': 'runs to show'}, toggles);
}

const sections = [makeSummary(), makeHeldOut(), makeCurves(), makePreferences(), makeEpisodes(), makeSettings()].filter(Boolean);
document.getElementById('top').append(element('h1', {}, data.runs.length === 1 ? data.runs[0].name : `${data.runs.length} runs`),
  element('div', {class: 'small soft'}, `ludic ${data.version}, made ${data.made}`),
  element('nav', {'aria-label': 'sections'}, sections.map((node) => element('a', {href: `#${node.id}`}, node.querySelector('h2').textContent))));
document.getElementById('main').replaceChildren(makeToggles(), ...sections);
document.documentElement.dataset.ready = String(Math.round(performance.now()));
