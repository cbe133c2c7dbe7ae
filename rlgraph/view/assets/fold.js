// Folding: steps that are drawn as one box. A fold is of a pool, of a region (steps that are repeated until a filter
// has let enough rows through), or of a step and what leads to it alone.

// A step and those of which everything goes to it, whatever the way.
function feeding(steps, links, id) {
  const out = new Map(steps.map((step) => [step.id, []]));
  for (const link of links) out.get(link.source).push(link.target);
  const found = new Set([id]);
  for (const step of [...steps].reverse()) { // steps stand behind what they read
    const targets = out.get(step.id);
    if (targets.length && targets.every((target) => found.has(target))) found.add(step.id);
  }
  return found;
}

// The steps and links that are drawn where some are folded; a box of several steps is a step that has them in `inside`.
// folds: [{pool}], [{region}] or [{step}], by name or, of a step, number. `at`: step -> the box that it is drawn in.
function foldedGraph({ steps, links }, folds, pools) {
  const place = new Map();
  const boxes = new Map(); // the last step in a box -> the box
  for (const fold of folds) {
    const inside = members(steps, links, fold).filter((step) => !place.has(step.id));
    if (inside.length < 2) continue;
    const box = boxOf(fold, inside, pools);
    boxes.set(inside[inside.length - 1], box);
    for (const step of inside) place.set(step.id, box.id);
  }
  const at = (id) => place.get(id) ?? id;
  const shown = steps.flatMap((step) => boxes.get(step) || (place.has(step.id) ? [] : [step]));
  return { steps: shown, links: joined(links, at), at };
}

function members(steps, links, fold) {
  for (const kind of ["pool", "region"]) if (fold[kind]) return steps.filter((step) => step[kind] === fold[kind]);
  if (!steps.some((step) => step.id === fold.step)) return []; // it is hidden
  const found = feeding(steps, links, fold.step);
  return steps.filter((step) => found.has(step.id));
}

function boxOf(fold, inside, pools) {
  const last = inside[inside.length - 1];
  const all = (field) => [...new Set(inside.flatMap((step) => step[field]))];
  const title = fold.pool ? `pool ${fold.pool}` : fold.region ? `until ${fold.region}` : last.title;
  const op = `${inside.length} steps, ${fold.pool ? devicesText(pools[fold.pool]) : fold.region ? "repeated" : "folded"}`;
  return {
    ...last, id: `folded ${title} ${fold.step ?? ""}`, title, op, does: `${title}: ${op}`, because: "", often: "", inserted: false, inside, fold,
    reads: all("reads"), writes: all("writes"), models: Object.fromEntries(inside.flatMap((step) => Object.entries(step.models))),
  };
}

// Links from box to box, those between the same two as one.
function joined(links, at) {
  const found = new Map();
  for (const link of links) {
    const [source, target] = [at(link.source), at(link.target)];
    if (source === target) continue;
    const key = `${source} ${target}`;
    if (!found.has(key)) found.set(key, { ...link, source, target, columns: [] });
    const { columns } = found.get(key);
    for (const column of link.columns) if (!columns.includes(column)) columns.push(column);
  }
  return [...found.values()];
}

// The boxes around steps: a pool's where there are several, and within it a region's where all of that lies in it.
function groupsOf(steps, pools) {
  const several = Object.keys(pools).length > 1;
  const drawn = (kind, name) => steps.some((step) => step[kind] === name && !(step.fold && step.fold[kind]));
  const groups = Object.keys(pools).filter((pool) => several && drawn("pool", pool)).map((pool) => ({ id: `pool ${pool}`, pool, text: `pool ${pool}: ${devicesText(pools[pool])}` }));
  const regions = [...new Set(steps.map((step) => step.region))].filter((region) => region && drawn("region", region));
  for (const region of regions) {
    const mine = new Set(steps.filter((step) => step.region === region).map((step) => step.pool));
    const [pool] = mine;
    if (mine.size === 1) groups.push({ id: `region ${region}`, region, pool, parent: several ? `pool ${pool}` : null, text: regionText(region) });
  }
  return groups;
}

const regionText = (region) => `repeated until ${region} has let enough rows through`;
const devicesText = (count) => `${count} device${count === 1 ? "" : "s"}`;
