// The margins and the calibration of reward models, on their held-out pairs.
function makePreferences() {
  const models = data.runs.map((run, number) => [run.preferences, number]).filter(([found]) => found);
  if (!models.length) return null;
  const box = element('div', {class: 'charts'});
  const draw = () => box.replaceChildren(...models.filter(([, run]) => shown.has(run)).flatMap(([found, run]) => [drawCalibration(found, run), drawMargins(found, run)]));
  whenShown(draw);
  draw();
  return section('preferences', 'Reward model', element('p', {class: 'soft small'}, 'On held-out pairs. A calibrated model is on the diagonal: of the pairs that it gives 70 %, 70 % are so.'), box);
}

function frame(title, run, ...lines) {
  const svg = drawn('svg', {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', 'aria-label': `${title}, ${data.runs[run].name}`});
  return [svg, element('div', {class: 'chart'}, element('h3', {}, swatch(run), ` ${data.runs[run].name}: ${title}`), svg, lines.map((line) => element('div', {class: 'small soft'}, line)))];
}

function drawCalibration({calibration, pairs}, run) {
  const [svg, node] = frame('calibration', run, `Expected calibration error ${format(calibration.error)}, ${format(pairs)} pairs. Circles grow with the number of predictions.`);
  const x = (value) => LEFT + value * (WIDTH - LEFT - RIGHT), y = (value) => HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM);
  for (const mark of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(drawn('line', {class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: y(mark), y2: y(mark)}), drawn('text', {x: LEFT - 6, y: y(mark) + 4, 'text-anchor': 'end'}, format(mark)),
      drawn('text', {x: x(mark), y: HEIGHT - 8, 'text-anchor': 'middle'}, format(mark)));
  }
  svg.append(drawn('line', {class: 'cross', x1: x(0), y1: y(0), x2: x(1), y2: y(1)}));
  const most = Math.max(...calibration.counts);
  calibration.counts.forEach((count, bin) => {
    if (!count) return;
    const said = `stated ${format(calibration.predicted[bin])}, true ${format(calibration.observed[bin])}, ${format(count)} predictions`;
    svg.append(drawn('circle', {cx: x(calibration.predicted[bin]), cy: y(calibration.observed[bin]), r: 3 + 9 * Math.sqrt(count / most), fill: colour(run), 'fill-opacity': 0.7}, drawn('title', {}, said)));
  });
  return node;
}

function drawMargins({margins, pairs}, run) {
  const [svg, node] = frame('margins', run, `Score of the preferred response less the other's. Median ${format(margins.median)}; ${format(margins.negative * 100)} % are negative (hollow), of ${format(pairs)} pairs.`);
  const [low, high] = [margins.edges[0], margins.edges.at(-1)], most = Math.max(...margins.counts);
  const x = (value) => LEFT + ((value - low) / (high - low)) * (WIDTH - LEFT - RIGHT), y = (count) => HEIGHT - BOTTOM - (count / most) * (HEIGHT - TOP - BOTTOM);
  for (const mark of ticks(0, most, 4)) {
    svg.append(drawn('line', {class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: y(mark), y2: y(mark)}), drawn('text', {x: LEFT - 6, y: y(mark) + 4, 'text-anchor': 'end'}, format(mark)));
  }
  for (const mark of ticks(low, high, 7)) svg.append(drawn('text', {x: x(mark), y: HEIGHT - 8, 'text-anchor': 'middle'}, format(mark)));
  margins.counts.forEach((count, bin) => {
    const [from, to] = [margins.edges[bin], margins.edges[bin + 1]], isWrong = to <= 1e-12;
    svg.append(drawn('rect', {x: x(from) + 0.5, y: y(count), width: x(to) - x(from) - 1, height: y(0) - y(count), fill: isWrong ? 'var(--paper)' : colour(run), stroke: colour(run),
      'stroke-dasharray': isWrong ? '3 2' : null}, drawn('title', {}, `${format(from)} to ${format(to)}: ${format(count)}`)));
  });
  svg.append(drawn('line', {class: 'axis', x1: x(0), x2: x(0), y1: TOP, y2: HEIGHT - BOTTOM}));
  return node;
}
