// What the scripts for Node share, as scenarios.py does for those of Python.

export const URL = process.env.SSD_URL
export const MODEL = 'stories-target'
export const KEY = 'none'
export const STORY = 'Tell me a story about a brave hen.'
export const TOO_LONG = 'Tell me a story about a hen and a fox. '.repeat(300) // of 2048 tokens

export const WEATHER = {
  type: 'object',
  properties: {
    city: { type: 'string', enum: ['Bern', 'Basel', 'Chur'] },
    days: { type: 'integer', enum: [1, 2, 3] },
  },
  required: ['city', 'days'],
  additionalProperties: false,
}

export function check(holds, found) {
  if (!holds) throw new Error(`not as it should be: ${JSON.stringify(found)}`)
}

export function checkWeather(given) {
  const found = typeof given === 'string' ? JSON.parse(given) : given
  check(WEATHER.properties.city.enum.includes(found.city), found)
  check(WEATHER.properties.days.enum.includes(found.days), found)
}

/** The error that a call ends with. */
export async function errorOf(run) {
  let found
  try {
    found = await run()
  } catch (error) {
    return error
  }
  throw new Error(`no error, but ${JSON.stringify(found)}`)
}

/** Run all scenarios, and tell of each in a line of JSON. */
export async function main(scenarios) {
  for (const [scenario, run] of Object.entries(scenarios)) {
    let error = ''
    try {
      await run()
    } catch (raised) {
      error = String(raised?.stack ?? raised)
    }
    console.log(JSON.stringify({ scenario, error }))
  }
}
